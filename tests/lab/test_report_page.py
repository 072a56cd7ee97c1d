"""The report's page and texts: whole, accessible, safe, and never half written."""

from __future__ import annotations

import csv
import io
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import METHODS, some_layers, write_run
from page import Page

from pufferfish.lab.report import report, write
from pufferfish.lab.report.svg import Scale, spread
from pufferfish.lab.report.text import latex


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
        dict(some_layers()[n % 16], name=f"encoder.layers.{n}.self_attention.projection") for n in range(100)
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
