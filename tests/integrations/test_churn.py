"""The short form of benchmarks/churn.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from benchmark import benchmark
from pufferfish.lab.network import unavailable_reason

churn = benchmark("churn")
REASON = unavailable_reason()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


def command(tmp_path: Path) -> list[str]:
    """The short form, on the text of this project's guides."""
    root = Path(__file__).parents[2]
    text = tmp_path / "text"
    text.write_bytes(b"".join(file.read_bytes() for file in sorted((root / "docs").rglob("*.md"))))
    return [sys.executable, str(root / "benchmarks" / "churn.py"), "--text", str(text), "--short"]


@needs_network
@pytest.mark.slow
@pytest.mark.timeout(900)  # the hang guard
def test_the_short_form(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = subprocess.run([*command(tmp_path), "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    calm, hit = map(json.loads, out.read_text().splitlines())
    assert (sum(calm["kills"].values()), calm["lost"], calm["made"]) == (0, 0, 960)
    assert (sum(hit["kills"].values()), hit["stops"], hit["lighthouse"]) == (6, 1, 1)
    assert hit["kills"]["switch"] >= 1
    assert hit["rounds"] == calm["rounds"]
    # A round that one replica completes and others do not has one anchor, which the others get: at most one for each accident.
    assert hit["rounds"] - 8 <= hit["compared"] <= hit["rounds"]
    assert "anchors differ" in done.stdout
