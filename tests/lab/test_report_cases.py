"""Reports of runs that lack something or do not fit together, odd names, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from made_up import write_run
from page import Page

from pufferfish.lab.report import report
from pufferfish.lab.report.report import as_markdown, markdown
from pufferfish.lab.report.tables import Cell, Table
from pufferfish.measure import RunLog


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "bf16", 1, finished=None, results={})
    bare = {"results": {}, "predicted": {}, "layers": [], "versions": {}, "hardware": {}}
    write_run(tmp_path / "bare", "bare", 0, **bare).joinpath("metrics.csv").write_text(
        "seconds,step,epoch,name,value\n"
    )
    with RunLog(tmp_path / "never", name="never", seed=0) as log:
        log.log(step=1, **{"valid/accuracy": math.nan})
        log.result(accuracy=math.nan)
    said = " ".join(Page(report([tmp_path])).said)
    for text in (
        "bf16: seed 1 did not finish; shown in the curves only.",
        "never: seed 0 ended without a finite accuracy.",
        "No reference to compare with",
        "no curves",
    ):
        assert text in said
    assert "bf16" in report([tmp_path], markdown=True)


def test_what_differs_is_not_compared_or_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "longer", 0, epochs=30)
    write_run(tmp_path / "c", "other seed", 1)
    for seed in range(2):
        settings = {"task": "cifar10", "data": {"crop": seed > 0}}
        write_run(tmp_path / f"d{seed}", "mixed", seed, settings=settings)
    page = Page(report([tmp_path]))
    rows = page.table("Comparison of methods")
    assert rows["longer"]["run speedup vs. bf16"][0] == "–"
    row = rows["other seed"]
    assert row["difference vs. bf16"][0] == row["step speedup vs. bf16"][0] == "–"
    for text in (
        "longer: not as many steps as bf16; run times are not compared, and the difference in accuracy is not at equal steps.",
        "other seed: no finished seed in common with bf16, so not compared.",
        "mixed: its runs differ in data.crop, not only in the seed.",
    ):
        assert text in page.said


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
    assert "## Comparison of methods (cifar10, 4 workers on 4 hosts, 1gbit" in report(
        [tmp_path], markdown=True
    )


def test_a_checksum_of_a_file_is_shown_only_to_tell_texts_apart(tmp_path: Path) -> None:
    for n, name in enumerate(("dense", "pufferfish")):
        write_run(tmp_path / name, name, 0, settings={"task": "net.py@e0a9d6abe03a"}, workers=1 + n, hosts=1)
    page = report([tmp_path])
    assert [title.split(",")[0] for title in re.findall(r"<h2>(.*?)</h2>", page)] == ["net.py", "net.py"]
    assert "e0a9d6abe03a" not in page
    write_run(tmp_path / "edited", "dense", 0, settings={"task": "net.py@0123456789ab"}, workers=1, hosts=1)
    titles = re.findall(r"<h2>(.*?)</h2>", report([tmp_path]))
    assert {title.split(",")[0] for title in titles} == {"net.py@e0a9d6abe03a", "net.py@0123456789ab"}


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
    assert f"\n| {markdown(name)} | " in report([tmp_path], markdown=True)


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
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json"):
        report([run])
