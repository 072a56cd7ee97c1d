"""The report: its figures against slow references, its page as a browser's parser sees it, and what is missing."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pufferfish.lab.report import report, write
from pufferfish.lab.report.statistics import student
from pufferfish.lab.report.svg import Scale, spread
from pufferfish.lab.report.text import latex
from pufferfish.measure import RunLog

METHODS = {  # seconds a step, bytes a step, parameters, last accuracy, seconds of the exchange that are hidden
    "dense": (1.50, 67e6, 11_173_834, 0.938, 0.21),
    "bf16": (1.25, 33.5e6, 11_173_834, 0.9382, 0.2),
    "powersgd-4": (0.92, 0.9e6, 11_173_834, 0.931, 0.0),
    "topk-0.01": (2.31, 2.7e6, 11_173_834, 0.925, 0.0),
    "pufferfish": (0.59, 20e6, 3_336_138, 0.9318, 0.05),
    "pufferfish+powersgd-4": (0.46, 0.5e6, 3_336_138, 0.930, 0.0),
}


def write_run(folder: Path, name: str, seed: int, *, epochs: int = 20, **changed: Any) -> Path:
    """A run as measure/runlog.py writes it, with made-up figures."""
    step, sent, parameters, accuracy, hidden = METHODS.get(name, METHODS["dense"])
    dense_step, dense_sent = METHODS["dense"][:2]
    wiggle = math.sin(7.0 * seed + len(name)) * 0.001
    low = "pufferfish" in name
    run = {
        "pufferfish_run": 1, "name": name, "seed": seed, "workers": 4, "hosts": 4,
        "settings": {"task": "cifar10", "method": name, "recipe": {"lr": 0.4, "epochs": epochs}},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "pufferfish": "0.1", "commit": "0f3c2a9"},
        "hardware": {"cpu": "A processor with a name", "cores": 8, "threads": 2, "gpu": None, "host": "lab1"},
        "link": {"asked": "1gbit", "got_mbit": 941.2 + seed, "latency_ms": 0.2},
        "started": f"2026-05-0{seed + 1}T10:00:00+00:00", "finished": "2026-05-04T11:00:00+00:00",
        "results": {
            "accuracy": accuracy + wiggle, "seconds_a_step": step * (1 + 0.02 * seed), "bytes_a_step": sent,
            "parameters": parameters, "peak_memory": parameters * 24,
        },
        "predicted": {"seconds_a_step": step * {"topk-0.01": 1.27}.get(name, 0.95 + 0.06 * seed)},
        "layers": _layers() if low else [],
    } | changed  # fmt: skip
    rows: list[list[object]] = []
    seconds, total = 0.0, 0.0
    for epoch in range(epochs):
        warm = low and epoch < epochs // 3
        seconds += 10 * (dense_step if warm else step * (1 + 0.02 * seed))
        total += 10 * (dense_sent if warm else sent)
        value = (accuracy + wiggle) * (1 - 0.85 * math.exp(-epoch / 3)) - (
            0.01 if epoch == epochs // 3 and low else 0
        )
        end = 10 * (epoch + 1)
        rows.append([seconds, end, epoch, "valid/accuracy", value + math.sin(3 * epoch + seed) * 0.004])
        rows.append([seconds, end, epoch, "bytes", total])
        parts = _parts(name, step, hidden) if not warm else _parts("dense", dense_step, 0.21)
        rows += [[seconds, end, epoch, f"time/{part}", value] for part, value in parts.items()]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    lines = [["seconds", "step", "epoch", "name", "value"], *rows]
    (folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return folder


def _parts(name: str, step: float, hidden: float) -> dict[str, float]:
    compute = 0.35 if "pufferfish" in name else 0.66
    coding = 0.06 if "powersgd" in name else 1.4 if "topk" in name else 0.0
    rest = step - compute - coding - 0.03
    shares = {"data": 0.01, "forward": compute * 0.36, "backward": compute * 0.64, "encode": coding * 0.7}
    return shares | {"exchange": rest, "decode": coding * 0.3, "optimizer": 0.02, "hidden": hidden}


def _layers() -> list[dict[str, Any]]:
    layers = []
    for n, width in enumerate([64] * 4 + [128] * 4 + [256] * 4 + [512] * 4):
        before = [width**0.5 * math.exp(-i / (8 + n)) + 0.3 for i in range(64)]
        after = [value * 1.1 for value in before[: width // 4]][:64]
        layers.append({
            "name": f"layer{n // 4 + 1}.{n // 2 % 2}.conv{n % 2 + 1}", "shape": [width, width, 3, 3], "full_rank": width,
            "rank": None if n < 2 else width // 4, "spectrum_before": before, "spectrum_after": before if n < 2 else after,
        })  # fmt: skip
    return layers


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for name in METHODS:
        for seed in range(3):
            write_run(folder / f"{name}-{seed}", name, seed)
    return folder


@pytest.fixture(scope="module")
def html(bench: Path) -> str:
    return report([bench])


class Page(HTMLParser):
    """What is in a page: elements with their attributes, and the cells of its tables; refuses what is not well-formed."""

    VOID = ("meta", "wbr", "br", "hr", "img", "input", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.rows: list[list[tuple[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes), list(self.open)))
        assert len(dict(attributes)) == len(attributes), f"{tag}: an attribute stands twice"
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attributes).get("data-value")))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.said.append(data)
        if "caption" in self.open:
            self.caption = data
        elif self.open and ("td" in self.open or "th" in self.open):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)

    def table(self, title: str) -> dict[str, dict[str, tuple[str, float | None]]]:
        """By row head, then by column: the text and the number behind it."""
        head, *rows = self.tables[title]
        return {
            row[0][0]: {
                name: (text, None if value is None else float(value))
                for (name, _), (text, value) in zip(head, row, strict=True)
            }
            for row in rows
        }


def student_by_integration(freedom: int) -> float:
    """The slow way: where the density from −t to t holds 95 %."""
    constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    step, area, t = 1e-4, 0.0, 0.0
    while area < 0.475:
        area += step * constant * (1 + (t + step / 2) ** 2 / freedom) ** (-(freedom + 1) / 2)
        t += step
    return t


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 15, 40])
def test_quantiles_of_student(freedom: int) -> None:
    assert student(freedom) == pytest.approx(student_by_integration(freedom), abs=2e-4)


def test_headline_equals_a_slow_reference(bench: Path, html: str) -> None:
    rows = Page(html).table("Methods side by side")
    runs = {
        (n, s): json.loads((bench / f"{n}-{s}/run.json").read_text())["results"]
        for n in METHODS
        for s in range(3)
    }
    ends = {
        key: max(float(line.split(",")[0]) for line in (bench / f"{key[0]}-{key[1]}/metrics.csv").read_text().splitlines()[1:])
        for key in runs
    }  # fmt: skip
    assert list(rows)[:2] == ["bf16", "dense"]
    assert set(rows) == set(METHODS)
    t = student_by_integration(2)
    for name, row in rows.items():
        scores = [100 * runs[name, seed]["accuracy"] for seed in range(3)]
        half = t * statistics.stdev(scores) / math.sqrt(3)
        assert row["accuracy, %"][0] == f"{sum(scores) / 3:.2f} ± {half:.2f}"
        assert row["accuracy, %"][1] == pytest.approx(sum(scores) / 3)
        assert row["parameters"] == (f"{METHODS[name][2]:,}", METHODS[name][2])
        assert row["a step"][1] == pytest.approx(METHODS[name][0] * 1.02)  # the seed in the middle
        assert row["bytes a step"][1] == METHODS[name][1]
        assert row["whole run"][1] == pytest.approx(sorted(ends[name, seed] for seed in range(3))[1])
        if name == "bf16":
            assert row["difference to bf16"][0] == row["step against bf16"][0] == "–"
            continue
        gaps = [100 * (runs[name, seed]["accuracy"] - runs["bf16", seed]["accuracy"]) for seed in range(3)]
        mean, half = sum(gaps) / 3, t * statistics.stdev(gaps) / math.sqrt(3)
        verdict = "" if abs(mean) <= half else ", better" if mean > 0 else ", worse"
        assert row["difference to bf16"][0] == f"{mean:+.2f} ± {half:.2f}{verdict}".replace("-", "−")
        steps = [runs["bf16", s]["seconds_a_step"] / runs[name, s]["seconds_a_step"] for s in range(3)]
        assert row["step against bf16"][1] == pytest.approx(sorted(steps)[1])
        wholes = sorted(ends["bf16", s] / ends[name, s] for s in range(3))
        assert row["run against bf16"][1] == pytest.approx(wholes[1])
    assert rows["topk-0.01"]["step against bf16"][0].endswith(": slower")
    assert rows["topk-0.01"]["difference to bf16"][0].endswith(", worse")


def test_breakdown_is_that_of_the_low_rank_phase(html: str) -> None:
    rows = Page(html).table("Where a step's time goes")
    for name, (step, _, _, _, hidden) in METHODS.items():
        assert rows[name]["sum"][1] == pytest.approx(step)  # hidden is not in it
        assert rows[name]["exchange, hidden"][1] == pytest.approx(hidden)
        for part, value in _parts(name, step, hidden).items():
            column = "exchange, hidden" if part == "hidden" else part
            assert rows[name][column][1] == pytest.approx(value)


def test_predictions_beyond_the_band_are_marked(html: str) -> None:
    rows = Page(html).table("Predicted and measured")
    assert rows["topk-0.01"]["error"] == ("+25 %, beyond 20 %", pytest.approx(1.27 / 1.02 - 1))
    assert rows["bf16"]["error"][0] == "−1 %"


def test_page_is_whole_and_needs_nothing_else(html: str) -> None:
    page = Page(html)
    assert len(html.encode()) < 1_000_000
    for tag, attributes, _ in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert re.findall(r"https?:|//\w|@import|@font-face|url\((?!#)", html) == []
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#(\w+)\)", html)) <= set(ids)
    assert "default-src 'none'" in html


def test_page_is_accessible(html: str) -> None:
    page = Page(html)
    pictures = [
        attributes for tag, attributes, inside in page.elements if tag == "svg" and "svg" not in inside
    ]
    assert all(a.get("role") == "img" or a.get("aria-hidden") == "true" for a in pictures)
    drawn = re.findall(r'<svg viewBox="[^"]+" role="img">(<title>[^<]+</title><desc>[^<]+</desc>)?', html)
    assert len(drawn) > 20
    assert all(drawn)
    heads = [attributes for tag, attributes, _ in page.elements if tag == "th"]
    assert {attributes["scope"] for attributes in heads} == {"col", "row"}
    count = sum(tag == "caption" for tag, _, _ in page.elements)
    assert count == len(page.tables) == sum(tag == "table" for tag, _, _ in page.elements)
    assert re.search('<html lang="en">', html)


def test_texts_say_what_the_page_says(bench: Path, html: str) -> None:
    tables = Page(html).tables
    markdown = report([bench], "markdown")
    latex_text = report([bench], "latex")
    rows = list(csv.DictReader(io.StringIO(report([bench], "csv"))))
    for title, shown in tables.items():
        _, rest = markdown.split(f"## {title}\n\n")
        lines = rest.split("\n\n")[0].splitlines()
        texts = [[text for text, _ in row] for row in shown]
        assert [line[2:-2].split(" | ") for line in lines[:1] + lines[2:]] == texts
        assert f"\\caption{{{latex(title)}." in latex_text
        for row in texts[1:]:
            assert " & ".join(map(latex, row)) + r" \\" in latex_text
        for n, row in enumerate(shown[1:], 1):
            for column, (text, value) in zip(texts[0], row, strict=True):
                (cell,) = [r for r in rows if (r["table"], r["row"], r["column"]) == (title, str(n), column)]
                assert cell["value"] == (value or ("" if text == "–" else text))
    half = [r for r in rows if r["column"] == "accuracy, % ±"]
    assert len(half) == len(METHODS)
    assert {r["table"] for r in rows} == {*tables, "Progress"}
    assert latex_text.count(r"\begin{tabular}") == latex_text.count(r"\bottomrule") == len(tables)


def test_curves_are_means_over_seeds(bench: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report([bench], "csv"))))
    cells: dict[str, dict[str, str]] = {}
    for r in rows:
        if r["table"] == "Progress":
            cells.setdefault(r["row"], {})[r["column"]] = r["value"]
    last = [c for c in cells.values() if (c["method"], c["over"]) == ("pufferfish", "bytes")][-1]
    found = []
    for seed in range(3):
        lines = (bench / f"pufferfish-{seed}/metrics.csv").read_text().splitlines()
        found.append([float(line.split(",")[4]) for line in lines if ",valid/accuracy," in line][-1])
        sent = [float(line.split(",")[4]) for line in lines if ",bytes," in line][-1]
    assert float(last["validation accuracy, %"]) == pytest.approx(100 * sum(found) / 3)
    assert float(last["lowest seed"]) == pytest.approx(100 * min(found))
    assert float(last["highest seed"]) == pytest.approx(100 * max(found))
    assert float(last["at"]) == sent


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "bf16", 1, finished=None, results={})
    for n, name in enumerate(("bare", "other")):
        folder = write_run(
            tmp_path / name, name, n, results={}, predicted={}, layers=[], versions={}, hardware={}
        )
        (folder / "metrics.csv").write_text("seconds,step,epoch,name,value\n")
    said = " ".join(Page(report([tmp_path])).said)
    assert "bf16: seed 1 did not finish; in the curves only." in said
    assert "No run has low-rank layers in its record." in said
    for form in ("csv", "latex", "markdown"):
        assert "bf16" in report([tmp_path], form)


def test_a_log_without_anything(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine"):
        pass
    said = " ".join(Page(report([tmp_path])).said)
    for text in (
        "Nothing to compare with",
        "No run says how long a step takes.",
        "no curves",
        "No run has low-rank",
    ):
        assert text in said


def test_a_run_that_was_never_a_number(tmp_path: Path) -> None:
    with RunLog(tmp_path / "a", name="dense", seed=0) as log:
        log.log(step=1, **{"valid/accuracy": math.nan})
        log.log(step=2, **{"valid/accuracy": 50.0})
        log.result(accuracy=math.nan)
    said = " ".join(Page(report([tmp_path])).said)
    assert "dense: seed 0 ended with a accuracy" not in said
    assert "dense: seed 0 ended with no number for accuracy." in said


def test_what_cannot_be_compared_stands_apart(tmp_path: Path) -> None:
    for n, link in enumerate(("100mbit", "1gbit")):
        for name in ("dense", "pufferfish"):
            write_run(tmp_path / f"{name}-{link}", name, 0, link={"asked": link, "got_mbit": 95.0 + n})
    page = report([tmp_path])
    assert page.count("<caption>Methods side by side</caption>") == 2
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        f"cifar10, 4 workers on 4 hosts, {link}, A processor with a name" for link in ("100mbit", "1gbit")
    ]
    assert "## Methods side by side (cifar10, 4 workers on 4 hosts, 1gbit" in report([tmp_path], "markdown")


def test_runs_of_other_lengths_are_not_compared_as_wholes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0, epochs=30)
    page = Page(report([tmp_path]))
    assert page.table("Methods side by side")["pufferfish"]["run against bf16"][0] == "–"
    assert "pufferfish: another number of steps than bf16; whole runs are not compared." in page.said


def test_seeds_are_paired_or_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 1)
    page = Page(report([tmp_path]))
    row = page.table("Methods side by side")["pufferfish"]
    assert row["difference to bf16"][0] == row["step against bf16"][0] == "–"
    assert "pufferfish: no finished seed in common with bf16, so nothing is paired." in page.said


def test_predicted_times_say_so(tmp_path: Path) -> None:
    for name in ("bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0, results={"accuracy": 0.9})
    page = Page(report([tmp_path]))
    row = page.table("Methods side by side")["pufferfish"]
    assert row["a step"][0] == "560 ms predicted"
    assert row["step against bf16"][0] == "2.12× predicted"
    assert {"a step, predicted", "2.12× as fast", "by the cost model, not measured"} <= set(page.said)


def test_a_prediction_never_beats_a_measurement(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0)
    write_run(tmp_path / "c", "dreamt", 0, finished=None, predicted={"seconds_a_step": 0.001})
    said = Page(report([tmp_path])).said
    assert {"a step", "2.12× as fast", "590 ms instead of 1.25 s"} <= set(said)


def test_when_nothing_is_faster(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "topk-0.01", 0)
    said = Page(report([tmp_path])).said
    assert said.count("nothing faster") == 2
    assert "the next is topk-0.01, 0.54×: slower" in said


def test_settings_that_differ_within_a_method_are_said(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(
            tmp_path / f"{seed}", "dense", seed, settings={"task": "cifar10", "data": {"crop": seed > 0}}
        )
    assert "dense: its runs differ in data.crop, not in the seed alone." in report([tmp_path])


def test_against_and_target(tmp_path: Path) -> None:
    for name in ("dense", "bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0)
    rows = Page(report([tmp_path], against="dense", target=90)).table("Methods side by side")
    assert rows["pufferfish"]["step against dense"][1] == pytest.approx(1.5 / 0.59)
    lines = [line.split(",") for line in (tmp_path / "dense/metrics.csv").read_text().splitlines()]
    first = next(float(line[0]) for line in lines if line[3] == "valid/accuracy" and float(line[4]) >= 0.9)
    assert rows["dense"]["time to 90"][1] == first
    with pytest.raises(ValueError, match=r"'fp8' is none of these runs' names: .*dense"):
        report([tmp_path], against="fp8")


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b&c', "100%_$x|{}~^\\"])
def test_names_are_text(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "a", name, 0, layers=[{"name": name, "rank": 2, "full_rank": 8, "shape": [8, 8]}])
    page = Page(report([tmp_path]))
    assert name in page.table("Methods side by side")
    assert sum(tag == "script" for tag, _, _ in page.elements) == 1
    assert f"| {name.replace('|', chr(92) + '|')} |" in report([tmp_path], "markdown")
    assert re.findall(r"(?<!\\)[%_#]", report([tmp_path], "latex")) == []


def test_a_large_bench_stays_small(tmp_path: Path) -> None:
    layers = [
        dict(_layers()[n % 16], name=f"encoder.layers.{n}.self_attention.projection") for n in range(100)
    ]
    for n in range(9):
        write_run(tmp_path / f"{n}", f"pufferfish-{n}", 0, epochs=400, layers=layers)
    page = report([tmp_path])
    assert len(page.encode()) < 1_000_000
    assert "the first 26 of 100 layers" in page
    Page(page)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: there is no such folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no run in it"):
        report([tmp_path])
    with pytest.raises(ValueError, match="name the folders"):
        report([])
    run = write_run(tmp_path / "runs" / "a", "dense", 0)
    assert report([run, run, tmp_path / "runs"]) == report([run])
    write_run(tmp_path / "runs" / "b", "dense", 0)
    with pytest.raises(ValueError, match=r"a and .*b are both 'dense' with seed 0: leave one out"):
        report([tmp_path / "runs"])
    with pytest.raises(ValueError, match="html, csv, latex, markdown"):
        report([run], "pdf")
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json"):
        report([run])


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write("page", tmp_path / "page.html")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    for bad in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(ValueError, match="name a file to write the report to"):
            write("page", bad)


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_labels_do_not_cover_each_other(places: list[float]) -> None:
    moved = spread(places, 15, 0, 300)
    order = sorted(range(len(places)), key=lambda i: (places[i], moved[i]))
    assert all(moved[b] - moved[a] > 14.99 for a, b in pairwise(order))
    assert all(-1e-9 <= at <= 300 + 1e-9 for at in moved)


@given(st.floats(1e-6, 1e9), st.floats(1.001, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low: float, factor: float, log: bool) -> None:
    scale = Scale(low, low * factor, 0, 1, log=log)
    ticks = scale.ticks(6)
    assert len(ticks) <= 7
    assert all(low * (1 - 1e-6) <= tick <= low * factor * (1 + 1e-6) for tick in ticks)
    assert log or len(ticks) >= 2
