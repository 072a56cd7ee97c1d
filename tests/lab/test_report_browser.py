"""The page in a real browser: charts show values, switch methods and axes, tables sort, it fits a phone and logs no errors."""

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
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=6000",
)  # fmt: skip

# A frame of this width, so that the page takes it for the screen's; what is found goes into the dumped document.
OUTER = """<!doctype html><meta charset="utf-8"><body><iframe style="width:%dpx;height:800px" srcdoc="%s"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
const settled = () => new Promise(done => setTimeout(done, 100));
frame.onload = async () => {
  const page = frame.contentDocument, table = page.querySelector("table"), found = {};
  const all = (query, inside = page) => [...inside.querySelectorAll(query)];
  const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const chart = kind => page.querySelector(`.chart.${kind}`);
  const inked = kind => { // how many pixels of the canvas are drawn upon
    const canvas = chart(kind).querySelector("canvas"), {width, height} = canvas;
    const copy = Object.assign(document.createElement("canvas"), {width, height}).getContext("2d", {willReadFrequently: true});
    copy.drawImage(canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, width, height).data;
    return pixels.filter((value, n) => n %% 4 === 3 && value).length;
  };
  const legend = kind => Object.fromEntries(all(".u-series", chart(kind)).map(
    row => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]));
  const label = (kind, name) => all(".u-series th", chart(kind)).find(head => head.textContent === name);
  const mouse = (kind, event, x, y) => {
    const over = chart(kind).querySelector(".u-over"), box = over.getBoundingClientRect();
    over.dispatchEvent(new MouseEvent(event, {movementX: 5,
      clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, view: frame.contentWindow}));
  };
  const hover = (kind, x, y) => mouse(kind, "mousemove", x, y);
  const axes = () => page.querySelector(".axes");
  const change = (input, value) => { Object.assign(input, value); input.dispatchEvent(new Event("change")); };
  await settled();
  found.first = page.querySelector("main").innerText.split("\\n").filter(x => x.trim())[1];
  found.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  found.charts = all(".chart canvas").map(x => [x.clientWidth, x.clientHeight]);
  found.ink = {curve: inked("curve")};

  hover("curve", 0.5, 0.5); await settled();
  found.hovered = legend("curve");
  label("curve", "pufferfish").click(); await settled();
  found.off = Object.fromEntries(all(".chart").map(
    (x, n) => [n, all(".u-series.u-off", x).map(row => row.querySelector(".u-label").textContent)]));
  found.less = inked("curve");
  label("curve", "pufferfish").click(); await settled();
  found.again = inked("curve");

  change(axes().querySelector("select"), {value: "bytes"}); await settled();
  hover("curve", 0.5, 0.5); await settled();
  found.overBytes = legend("curve");
  change(axes().querySelector("[name=logY]"), {checked: true}); await settled();
  found.log = inked("curve");
  change(axes().querySelector("select"), {value: "step"}); await settled();
  hover("curve", 1, 0.5); await settled();
  found.overSteps = legend("curve");
  for (const [event, x] of [["mousedown", 0.5], ["mousemove", 0.8], ["mouseup", 0.8]]) { mouse("curve", event, x, 0.5); await settled(); }
  hover("curve", 0, 0.5); await settled();
  found.zoomed = legend("curve").step;

  const button = all("thead button").find(x => x.textContent === "step time");
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
    assert "as fast as bf16" in found["first"]  # below the title
    assert len(found["charts"]) == 2  # the accuracy and the loss
    assert all(w > 250 and h > 150 for w, h in found["charts"])
    assert all(count > 2000 for count in found["ink"].values())
    # One reads values where the pointer is, over whatever the axis is.
    assert found["hovered"].keys() == {"time", *METHODS}
    for point in (found["hovered"], found["overBytes"], found["overSteps"]):
        assert all(re.fullmatch(r"\d[\d.]*", point[name]) for name in METHODS)
    assert re.fullmatch(r"[\d.]+ min", found["hovered"]["time"])
    assert re.fullmatch(r"[\d.]+ GB", found["overBytes"]["bytes"])
    assert found["overSteps"]["step"] == "200"
    assert 90 <= int(found["zoomed"]) <= 120
    # A method that is switched off in one chart is off in all that have it, and comes back.
    assert [names for names in found["off"].values() if names] == [["pufferfish"]] * 2
    assert found["less"] < found["again"] == pytest.approx(found["ink"]["curve"], rel=0.05)
    assert found["log"] > 2000
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
