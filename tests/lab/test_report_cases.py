"""Reports of runs that lack something or do not fit together, odd names, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from made_up import some_layers, write_run
from page import Page

from pufferfish.lab.report import report, write
from pufferfish.lab.report.export import as_markdown, markdown
from pufferfish.lab.report.tables import Cell, Table
from pufferfish.measure import RunLog


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "bf16", 1, finished=None, results={})
    for n, name in enumerate(("bare", "other")):
        folder = write_run(
            tmp_path / name, name, n, results={}, predicted={}, layers=[], versions={}, hardware={}
        )
        (folder / "metrics.csv").write_text("seconds,step,epoch,name,value\n")
    said = " ".join(Page(report([tmp_path])).said)
    assert "bf16: seed 1 did not finish; shown in the curves only." in said
    assert "No run recorded low-rank layers." in said
    assert "bf16" in report([tmp_path], "markdown")


def test_a_log_without_anything(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine"):
        pass
    said = " ".join(Page(report([tmp_path])).said)
    for text in (
        "No reference to compare with",
        "No run recorded the time of a step.",
        "no curves",
        "No run recorded low-rank",
    ):
        assert text in said


def test_a_run_that_was_never_a_number(tmp_path: Path) -> None:
    with RunLog(tmp_path / "a", name="dense", seed=0) as log:
        log.log(step=1, **{"valid/accuracy": math.nan})
        log.log(step=2, **{"valid/accuracy": 50.0})
        log.result(accuracy=math.nan)
    said = " ".join(Page(report([tmp_path])).said)
    assert "dense: seed 0 ended without a finite accuracy." in said


def test_what_cannot_be_compared_stands_apart(tmp_path: Path) -> None:
    for n, link in enumerate(("100mbit", "1gbit")):
        for name in ("dense", "pufferfish"):
            write_run(tmp_path / f"{name}-{link}", name, 0, link={"asked": link, "got_mbit": 95.0 + n})
    page = report([tmp_path])
    assert page.count("<caption>Comparison of methods</caption>") == 2
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        f"cifar10, 4 workers on 4 hosts, {link}, A processor with a name" for link in ("100mbit", "1gbit")
    ]
    assert "## Comparison of methods (cifar10, 4 workers on 4 hosts, 1gbit" in report([tmp_path], "markdown")


def test_a_checksum_of_a_file_is_shown_only_to_tell_texts_apart(tmp_path: Path) -> None:
    for n, name in enumerate(("dense", "pufferfish")):
        write_run(tmp_path / name, name, 0, settings={"task": "net.py@e0a9d6abe03a"}, workers=1 + n, hosts=1)
    page = report([tmp_path])
    assert [title.split(",")[0] for title in re.findall(r"<h2>(.*?)</h2>", page)] == ["net.py", "net.py"]
    assert "e0a9d6abe03a" not in page
    write_run(tmp_path / "edited", "dense", 0, settings={"task": "net.py@0123456789ab"}, workers=1, hosts=1)
    titles = re.findall(r"<h2>(.*?)</h2>", report([tmp_path]))
    assert {title.split(",")[0] for title in titles} == {"net.py@e0a9d6abe03a", "net.py@0123456789ab"}


def test_run_times_of_other_lengths_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0, epochs=30)
    page = Page(report([tmp_path]))
    assert page.table("Comparison of methods")["pufferfish"]["run speedup vs. bf16"][0] == "–"
    assert (
        "pufferfish: not as many steps as bf16; run times are not compared, and the difference in accuracy is not at equal steps."
        in page.said
    )
    assert any(line.endswith("in a run of another length.") for line in page.said)  # the verdict


def test_seeds_are_paired_or_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 1)
    page = Page(report([tmp_path]))
    row = page.table("Comparison of methods")["pufferfish"]
    assert row["difference vs. bf16"][0] == row["step speedup vs. bf16"][0] == "–"
    assert "pufferfish: no finished seed in common with bf16, so not compared." in page.said


def test_predicted_times_say_so(tmp_path: Path) -> None:
    for name in ("bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0, results={"accuracy": 0.9})
    page = Page(report([tmp_path]))
    row = page.table("Comparison of methods")["pufferfish"]
    assert row["step time"][0] == "560 ms (predicted)"
    assert row["step speedup vs. bf16"][0] == "2.12× (predicted)"


def test_a_prediction_never_beats_a_measurement(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "pufferfish", 0, epochs=30)  # of another length, so that steps are compared
    write_run(tmp_path / "c", "dreamt", 0, finished=None, predicted={"seconds_a_step": 0.001})
    (said,) = re.findall(r'<p class="verdict">(.*?)</p>', report([tmp_path]))
    assert said.startswith("pufferfish computes a step 2.12× as fast as bf16 and ")


def test_settings_that_differ_within_a_method_are_said(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(
            tmp_path / f"{seed}", "dense", seed, settings={"task": "cifar10", "data": {"crop": seed > 0}}
        )
    assert "dense: its runs differ in data.crop, not only in the seed." in report([tmp_path])


def test_another_reference(tmp_path: Path) -> None:
    for name in ("dense", "bf16", "pufferfish"):
        write_run(tmp_path / name, name, 0)
    rows = Page(report([tmp_path], against="dense")).table("Comparison of methods")
    assert rows["pufferfish"]["step speedup vs. dense"][1] == pytest.approx(1.5 / 0.59)
    with pytest.raises(ValueError, match=r"'fp8' is not the name of a run; .*dense"):
        report([tmp_path], against="fp8")


NAMES = [
    "<script>alert(1)</script>", 'a"b&c', "100%_$x|{}~^\\", "[x](javascript:y)", "![x](y)", "`code` ``", "__init__",
    "*a* **b**", "a|b\\|c", "~~no~~ &lt; $x$", "# head #", "- item", "1. item", "12) item", "> quote", "<http://a.b>",
    "weight_decay", "a_ _b",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "a", name, 0, layers=[{"name": name, "rank": 2, "full_rank": 8, "shape": [8, 8]}])
    page = Page(report([tmp_path]))
    assert name in page.table("Comparison of methods")
    assert sum(tag == "script" for tag, _, _ in page.elements) == 3  # data, library, and what draws
    assert [method["name"] for method in page.data["methods"]] == [name]


@pytest.mark.parametrize("name", [*NAMES, "two\nlines", "a\n\n| b | c |\n|---|---|"])
def test_names_are_text_in_markdown(tmp_path: Path, name: str) -> None:
    """A Markdown parser finds the same headings, cells and notes, and nothing in them but text."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    table = Table(f"of {name}", [name, "x"], [[Cell(name), Cell("+1", 1.0)]], [f"{name}: a note"])
    tokens = parser.parse(as_markdown([table]))
    inline = [token for token in tokens if token.type == "inline"]
    found = ["".join(child.content for child in token.children) for token in inline]
    once = " ".join(name.split())
    assert found == [f"of {once}", once, "x", once, "+1", f"{once}: a note"]
    assert {child.type for token in inline for child in token.children} <= {"text", "text_special"}
    assert {token.tag for token in tokens} == {"h2", "table", "thead", "tbody", "tr", "th", "td", "p", ""}
    write_run(tmp_path / "a", name, 0)
    assert f"\n| {markdown(name)} | " in report([tmp_path], "markdown")


def test_a_large_bench_stays_small(tmp_path: Path) -> None:
    layers = [
        dict(some_layers()[n % 16], name=f"encoder.layers.{n}.self_attention.projection") for n in range(100)
    ]
    for n in range(9):
        write_run(tmp_path / f"{n}", f"pufferfish-{n}", 0, epochs=400, layers=layers)
    page = report([tmp_path])
    assert len(page.encode()) < 1_000_000


def test_runs_of_one_name_and_seed_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "bench-b" / "runs" / "dense" / str(seed), "dense", seed)
    (tmp_path / "bench-b" / "bench.json").write_text("{}")
    write_run(tmp_path / "a-dense-0", "dense", 0)
    write_run(tmp_path / "a-pufferfish-0", "pufferfish", 0)
    seeds = {
        name: row["seeds"][0] for name, row in Page(report([tmp_path])).table("Comparison of methods").items()
    }
    assert seeds == {"dense": "2", "dense (a-dense-0)": "1", "pufferfish": "1"}
    assert "vs. dense (a-dense-0)" in report([tmp_path], against="dense (a-dense-0)")
    for seed in (0, 1, 2):
        write_run(tmp_path / "bench-c" / "runs" / "dense" / str(seed), "dense", seed)
    (tmp_path / "bench-c" / "bench.json").write_text("{}")
    seeds = {
        name: row["seeds"][0] for name, row in Page(report([tmp_path])).table("Comparison of methods").items()
    }
    assert seeds == {"dense": "2", "dense (bench-c)": "3", "dense (a-dense-0)": "1", "pufferfish": "1"}


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no runs found"):
        report([tmp_path])
    with pytest.raises(ValueError, match="pass the folder"):
        report([])
    run = write_run(tmp_path / "runs" / "a", "dense", 0)
    assert report([run, run, tmp_path / "runs"]) == report([run])
    with pytest.raises(ValueError, match="html, markdown"):
        report([run], "pdf")
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json"):
        report([run])


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write("page", tmp_path / "page.html")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
