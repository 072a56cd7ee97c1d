"""The page in a real browser: it renders, sorts, fits a phone and logs no errors."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_up import METHODS, write_run

from pufferfish.lab.report import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=3000",
)  # fmt: skip

# A frame of this width, so that the page takes it for the screen's; what is found goes into the dumped document.
OUTER = """<!doctype html><meta charset="utf-8"><body><iframe style="width:%dpx;height:800px" srcdoc="%s"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, table = page.querySelector("table"), found = {};
  const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const size = x => { const box = x.getBoundingClientRect(); return [box.width, box.height]; };
  found.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  found.figures = [...page.querySelectorAll("figure > svg")].map(size);
  found.lines = [...page.querySelectorAll("path.line")].filter(x => x.checkVisibility()).map(x => x.getTotalLength());
  found.text = Math.min(...[...page.querySelectorAll("figure > svg text")].map(x => size(x)[1]));
  const button = [...page.querySelectorAll("thead button")].find(x => x.textContent === "step time");
  button.click(); found.up = names(); found.sort = button.parentNode.ariaSort;
  button.click(); found.down = names();
  document.querySelector("pre").textContent = JSON.stringify(found);
};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1240, 390])
def test_in_chromium(tmp_path: Path, width: int) -> None:
    for name in METHODS:
        for seed in range(2):
            write_run(tmp_path / "runs" / f"{name}-{seed}", name, seed)
    outer = tmp_path / "outer.html"
    outer.write_text(OUTER % (width, html.escape(report([tmp_path / "runs"]))), encoding="utf-8")
    found, complaints = looked_at(outer, tmp_path / "profile")
    assert complaints == []
    assert found["wide"] <= 0  # tables scroll in their own frame; the page does not
    assert len(found["figures"]) == 5
    assert all(w > 250 and h > 100 for w, h in found["figures"])
    assert found["text"] > 8  # pixels: to be read, also on a phone
    assert len(found["lines"]) > 2 * len(METHODS)
    assert all(length > 10 for length in found["lines"])
    by_step = sorted(METHODS, key=lambda name: METHODS[name][0])
    assert (found["up"], found["sort"], found["down"]) == (by_step, "ascending", by_step[::-1])


def looked_at(page: Path, profile: Path) -> tuple[dict[str, Any], list[str]]:
    """What the page's script found, and what the browser's console says."""
    assert CHROMIUM is not None
    told = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (written,) = re.findall("<pre>(.*?)</pre>", told.stdout)
    return json.loads(html.unescape(written)), [
        line for line in told.stderr.splitlines() if "CONSOLE" in line
    ]
