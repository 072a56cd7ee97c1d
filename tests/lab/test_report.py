"""The report of a whole bench: its figures against simple reference code, its page as an HTML parser sees it."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from made_up import METHODS, write_run
from page import Page

import pufferfish.lab.report
from pufferfish.lab.report import report
from pufferfish.lab.report.comparison import t_quantile
from pufferfish.lab.report.report import markdown as escaped

LIBRARY = "uplot/uPlot.iife.min.js"


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


def student_by_integration(freedom: int) -> float:
    """Reference: integrate the density until the range from −t to t contains 95 %."""
    constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    step, area, t = 1e-4, 0.0, 0.0
    while area < 0.475:
        area += step * constant * (1 + (t + step / 2) ** 2 / freedom) ** (-(freedom + 1) / 2)
        t += step
    return t


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 15, 40])
def test_quantiles_of_student(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(student_by_integration(freedom), abs=2e-4)


def test_headline_equals_a_slow_reference(bench: Path, html: str) -> None:
    rows = Page(html).table("Comparison of methods")
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
        assert row["step time"][1] == pytest.approx(METHODS[name][0] * 1.02)  # the seed in the middle
        assert row["bytes per step"][1] == METHODS[name][1]
        assert row["run time"][1] == pytest.approx(sorted(ends[name, seed] for seed in range(3))[1])
        if name == "bf16":
            assert row["difference vs. bf16"][0] == row["step speedup vs. bf16"][0] == "–"
            continue
        gaps = [100 * (runs[name, seed]["accuracy"] - runs["bf16", seed]["accuracy"]) for seed in range(3)]
        mean, half = sum(gaps) / 3, t * statistics.stdev(gaps) / math.sqrt(3)
        verdict = "" if abs(mean) <= half else ", better" if mean > 0 else ", worse"
        assert row["difference vs. bf16"][0] == f"{mean:+.2f} ± {half:.2f}{verdict}".replace("-", "−")
        steps = [runs["bf16", s]["seconds_a_step"] / runs[name, s]["seconds_a_step"] for s in range(3)]
        assert row["step speedup vs. bf16"][1] == pytest.approx(sorted(steps)[1])
        wholes = sorted(ends["bf16", s] / ends[name, s] for s in range(3))
        assert row["run speedup vs. bf16"][1] == pytest.approx(wholes[1])
    assert rows["topk(0.01)"]["step speedup vs. bf16"][0].endswith("(slower)")
    assert rows["topk(0.01)"]["difference vs. bf16"][0].endswith(", worse")


def test_curves_are_means_over_seeds(bench: Path, html: str) -> None:
    data = Page(html).data
    chart = next(c for c in data["charts"] if c.get("label") == "validation accuracy, %")
    line = next(x for x in chart["lines"] if data["methods"][x["method"]]["name"] == "pufferfish")
    found = []
    for seed in range(3):
        rows = (bench / f"pufferfish-{seed}/metrics.csv").read_text().splitlines()
        found.append([100 * float(row.split(",")[4]) for row in rows if ",valid/accuracy," in row][-1])
        sent = [float(row.split(",")[4]) for row in rows if ",bytes," in row][-1]
    ends = [line["y"][-1], line["low"][-1], line["high"][-1], data["grids"][line["grid"]]["bytes"][-1]]
    assert ends == pytest.approx([sum(found) / 3, min(found), max(found), sent], rel=1e-4)


def test_page_is_whole_and_needs_nothing_else(html: str) -> None:
    page = Page(html)
    assert len(html.encode()) < 1_000_000
    for tag, attributes, _ in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    without_library = html.replace((Path(pufferfish.lab.report.__file__).parent / LIBRARY).read_text(), "")
    assert len(without_library) < len(html) - 50_000
    assert re.findall(r"https?:|//\w|@import|@font-face|url\(", without_library) == []
    assert "Copyright (c) 2022 Leon Sorokin" in html  # the library's licence goes with it
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for tag, attributes, _ in page.elements if tag == "a"]
    assert len(links) == 3
    assert {link.removeprefix("#") for link in links if link} <= set(ids)
    assert "default-src 'none'" in html


def test_page_is_accessible(html: str) -> None:
    page = Page(html)
    drawn = [attributes for _, attributes, _ in page.elements if "data-chart" in attributes]
    assert [int(a["data-chart"] or "") for a in drawn] == list(range(len(page.data["charts"])))
    assert len(drawn) == 2
    assert all(a["aria-label"] for a in drawn)
    count = sum(tag == "caption" for tag, _, _ in page.elements)
    assert count == len(page.tables) == sum(tag == "table" for tag, _, _ in page.elements)
    assert re.search('<html lang="en">', html)


def test_markdown_says_what_the_page_says(bench: Path, html: str) -> None:
    markdown = report([bench], markdown=True)
    for title, shown in Page(html).tables.items():
        _, rest = markdown.split(f"## {escaped(title)}\n\n")
        lines = rest.split("\n\n")[0].splitlines()
        cells = [[escaped(text) for text, _ in row] for row in shown]
        assert [line[2:-2].split(" | ") for line in lines[:1] + lines[2:]] == cells
