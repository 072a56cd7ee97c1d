"""The sentence at the top, and that everything a run was given is on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_up import METHODS, write_run
from page import Page

from pufferfish.lab.report import report
from pufferfish.measure import RunLog


def verdict(folder: Path, **options: str) -> str:
    (found,) = re.findall(r'<h1>.*?</h1><p class="verdict">(.*?)</p>', report([folder], **options))
    return found


def runs(folder: Path, **methods: tuple[float, list[float]]) -> Path:
    """Runs with these seconds and these accuracies by seed."""
    for name, (seconds, accuracies) in methods.items():
        for seed, accuracy in enumerate(accuracies):
            with RunLog(folder / f"{name}-{seed}", name=name, seed=seed) as log:
                log.result(accuracy=accuracy, seconds=seconds)
                log.log(step=10, loss=1.0)
    return folder


DENSE = (10.0, [0.90, 0.91, 0.92])


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"fast": (5.0, [0.90, 0.91, 0.921])},
         "fast trains 2.00× as fast as dense and differs by +0.03 ± 0.14 points in accuracy, which may be chance."),
        ({"fast": (5.0, [0.88, 0.89, 0.901])},
         "fast trains 2.00× as fast as dense and loses 1.97 ± 0.14 points of accuracy."),
        ({"fast": (5.0, [0.88, 0.89, 0.901]), "faster": (2.0, [0.80, 0.81, 0.821])},
         "faster trains 5.00× as fast as dense and loses 9.97 ± 0.14 points of accuracy. Every faster method loses accuracy."),
        ({"fast": (5.0, [0.92, 0.93, 0.941]), "faster": (2.0, [0.80, 0.81, 0.821])},
         "fast trains 2.00× as fast as dense and gains 2.03 ± 0.14 points of accuracy. faster is faster, 5.00×, but loses "
         "9.97 ± 0.14 points of accuracy."),
        ({"slow": (20.0, [0.90])},
         "No method trains faster than dense: the closest is slow, 0.50× (slower). It has the same accuracy in one seed."),
        ({"fast": (5.0, [0.89])},
         "fast trains 2.00× as fast as dense and loses 1.00 points of accuracy in one seed, which may be chance."),
        ({}, "dense reaches accuracy 91.00 ± 2.48 %. There is no other method to compare with dense."),
    ],
)  # fmt: skip
def test_what_the_first_sentence_says(
    tmp_path: Path, others: dict[str, tuple[float, list[float]]], said: str
) -> None:
    assert verdict(runs(tmp_path, dense=DENSE, **others)) == said


def test_verdicts_without_times_or_reference(tmp_path: Path) -> None:
    for name, perplexities in (("dense", (80.0, 81.0)), ("other", (90.0, 91.1))):
        for seed, perplexity in enumerate(perplexities):
            with RunLog(tmp_path / f"{name}-{seed}", name=name, seed=seed) as log:
                log.result(perplexity=perplexity)
    said = "other worsens perplexity by 10.05 ± 0.64. No times were recorded for both."
    assert verdict(tmp_path) == said
    with RunLog(tmp_path / "alone" / "mine", name="mine") as log:
        log.result(loss=0.25)
    assert verdict(tmp_path / "alone").startswith("mine reaches loss 0.2500. There is no reference run")


def test_bounds_are_no_wins(tmp_path: Path) -> None:
    for name in ("dense", "bf16", "pufferfish"):
        for seed in range(3):
            write_run(tmp_path / "runs" / name / f"{seed}", name, seed)
    methods = {name: {"results": {}, "predicted": {}} for name in ("dense", "bf16", "pufferfish")}
    methods["no exchange"] = {"results": {"seconds_a_step": 0.1}, "predicted": {}}
    (tmp_path / "summary.json").write_text(json.dumps({"methods": methods}))
    page = report([tmp_path])
    (row,) = [r for r in re.findall("<tr>(.*?)</tr>", page) if "no exchange" in r and "12.50×" in r]
    assert "good" not in row
    assert "no exchange" not in verdict(tmp_path)


def test_unfinished_runs_have_curves_of_their_own(tmp_path: Path) -> None:
    """A seed that has just begun does not cut the curve of the finished ones."""
    write_run(tmp_path / "0", "pufferfish", 0)
    write_run(tmp_path / "1", "pufferfish", 1, epochs=5, finished=None, results={})
    page = Page(report([tmp_path]))
    main = next(chart for chart in page.data["charts"] if chart.get("label") == "validation accuracy, %")
    assert [(line["label"], len(line["y"])) for line in main["lines"]] == [
        ("", 20),
        ("seed 1, unfinished", 5),
    ]
    (mark,) = main["lines"][0]["marks"]
    assert (mark["label"], mark["step"], mark["seconds"]) == ("switch", 60, pytest.approx(90.0))
    assert mark["bytes"] == pytest.approx(6 * 10 * METHODS["dense"][1])
