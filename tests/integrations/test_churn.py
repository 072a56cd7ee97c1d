"""The short form of benchmarks/churn.py, and what it decides from: accidents, lines of the replicas, losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

from benchmark import benchmark
from pufferfish.lab.network import unavailable_reason

churn = benchmark("churn")
REASON = unavailable_reason()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


def test_accidents_follow_from_the_seed() -> None:
    job = churn.Job("streaming", 600)
    found = [churn.schedule(job, 32, 4, True, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    kills = [accident for accident in found[0] if accident.kind == "kill"]
    assert (len(kills), len(found[0])) == (32, 37)
    assert {phase: sum(a.phase == phase for a in kills) for phase in ("switch", "flight", "joining")} == {
        "switch": 2,
        "flight": 6,
        "joining": 6,
    }
    assert all(job.h <= accident.position < job.last for accident in found[0])
    assert not any(a.phase == "flight" for a in churn.schedule(churn.Job("plain", 600), 32, 0, False, 0))


def supervisor(folder: Path) -> Any:
    return churn.Supervisor(None, folder / "job", churn.Job("plain", 100), b"", [])


def test_anchors_and_pauses_are_read_from_what_replicas_write(tmp_path: Path) -> None:
    found = supervisor(tmp_path)
    end = {"end": "e", "loss": 2.0, "position": 100, "low_rank": True}
    lines = [
        [{"round": 1, "digest": "a"}, {"round": 2, "digest": "b"}, {"pause": 3.0}, end],
        [{"round": 1, "digest": "a"}, {"round": 2, "digest": "c"}, {"lost": 4}, {"pause": 9.0}, end],
        [{"round": 3, "digest": "d"}, {"pause": 5.0}, end],
        [{"lost": 2}],
    ]
    for host, some in zip(found.hosts, lines, strict=True):
        text = "".join(json.dumps({"time": 20.0, **line}) + "\n" for line in some)
        (found.folder / f"lines-{host.number}").write_text(text)
    found.hosts[1].away = [[12.0, 13.0]]  # it was stopped, so its pause is its own
    found.few = [[1.0, 15.5]]
    found.read_lines()
    result = found.result
    assert (result.rounds, result.compared, result.different, result.lost) == (3, 2, 1, 6)
    assert result.pauses == {"with two left": 5.0, "without Lighthouse": 0.0, "otherwise": 3.0}
    assert (result.replicas, result.loss) == (3, 2.0)


@pytest.mark.parametrize(
    "problem",
    [{}, {"different": 1}, {"errors": ["replica 1 has ended"]}, {"replicas": 3}, {"loss": 2.3},
     {"kills": {"training": 4}}],
    ids=str,
)  # fmt: skip
def test_the_verdict(problem: dict[str, Any]) -> None:
    calm = {"loss": 2.0, "replicas": 4, "different": 0, "compared": 9, "errors": [], "kills": {"training": 0}}
    hit = {**calm, "kills": {"training": 3, "switch": 2}, **problem}
    assert churn.verdict([calm, {**calm, "loss": 2.05}, hit], 5) == (not problem)


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


@needs_network
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"TMPDIR={tmp_path}"  # in the environment of all its processes
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command(tmp_path), env=env, stdout=subprocess.DEVNULL)

    def processes() -> int:
        found = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                found += mark.encode() in (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
        return found

    while not list(tmp_path.glob("*/job/lines-3")):  # the last replica is there
        assert process.poll() is None
        time.sleep(0.05)
    assert processes() > churn.REPLICAS
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert processes() == 0
    assert not list(tmp_path.glob("*/job"))
