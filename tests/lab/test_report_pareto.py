"""Quality over costs: the Pareto front against a slow reference, times on other links, and files of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import METHODS, write_run
from page import Page

from pufferfish.cli import main
from pufferfish.lab.report import report
from pufferfish.lab.report.comparison import Comparison, compare_runs, find_runs
from pufferfish.lab.report.link_times import predicted_step, run_seconds, step_seconds
from pufferfish.lab.report.pareto import pareto_front, pareto_views
from pufferfish.measure import RunLog
from pufferfish.measure.link import GOODPUT

POINTS = st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9)


@given(POINTS)
def test_the_front_is_what_nothing_beats(points: dict[str, tuple[float, float]]) -> None:
    """Reference: from the cheapest on, a point must be better than all cheaper ones, and the best of its cost."""
    expected, best = set(), -1.0
    for cost in sorted({cost for cost, _ in points.values()}):
        top = max(quality for c, quality in points.values() if c == cost)
        if top > best:
            expected |= {name for name, point in points.items() if point == (cost, top)}
            best = top
    front = pareto_front(points)
    assert set(front) == expected
    assert [points[name][0] for name in front] == sorted(points[name][0] for name in front)


def one_device(folder: Path) -> Comparison:
    """A dense run, one that is low-rank after 40 of 100 updates, and a narrow one, two seeds each, on one device."""
    sizes = {"dense": (8e6, 0.1, 0.9), "pufferfish": (2e6, 0.05, 0.895), "narrow": (2e6, 0.04, 0.88)}
    for name, (parameters, seconds, accuracy) in sizes.items():
        for seed in range(2):
            with RunLog(folder / f"{name}-{seed}", name=name, seed=seed, settings={"task": "t"}) as log:
                changed = (
                    {"updates_before_change": 40, "low_rank_updates": 60} if name == "pufferfish" else {}
                )
                log.result(
                    accuracy=accuracy + seed / 500, seconds_a_step=seconds, parameters=parameters, updates=100, **changed
                )  # fmt: skip
    (comparison,) = compare_runs(find_runs([folder]))
    return comparison


def test_costs_of_runs_on_one_device(tmp_path: Path) -> None:
    views = {view.title: view for view in pareto_views(one_device(tmp_path))}
    assert list(views) == [
        "parameters", "bytes on 4 hosts", "training time, one device", "training time, 100 Mbit/s", "training time, 1 Gbit/s",
        "training time, 10 Gbit/s",
    ]  # fmt: skip
    assert views["parameters"].front == ["pufferfish", "dense"]
    assert views["bytes on 4 hosts"].costs["dense"] == 8e6 * 2 * 1.5  # bf16, a ring of 4 hosts
    assert views["training time, one device"].costs == pytest.approx(
        {"dense": 10.0, "pufferfish": 40 * 0.1 + 60 * 0.05, "narrow": 4.0}
    )
    assert views["training time, one device"].front == ["narrow", "pufferfish", "dense"]
    dense, small = (predicted_step(s, n, "100mbit") for s, n in ((0.1, 8e6), (0.05, 2e6)))
    slow = views["training time, 100 Mbit/s"].costs
    assert slow["pufferfish"] == pytest.approx(40 * dense + 60 * small)
    page = Page(report([tmp_path]))
    charts = [chart for chart in page.data["charts"] if chart["kind"] == "scatter"]
    assert [chart["x"] for chart in charts][2:4] == [
        "training time on one device",
        "training time on 100 Mbit/s",
    ]
    names = [method["name"] for method in page.data["methods"]]
    drawn = {names[point["method"]]: point for point in charts[0]["points"]}
    assert {name for name, point in drawn.items() if point["front"]} == {"pufferfish", "dense"}
    assert drawn["dense"]["y"] == pytest.approx(90.1)
    assert drawn["dense"]["half"] == pytest.approx(
        12.7062 * 0.1, rel=1e-3
    )  # Student's t with one degree of freedom
    row = page.table("Quality and cost")["narrow"]
    assert (row["parameters"][0], row["training time, one device"][0]) == ("2,000,000", "4 s *")


def test_times_of_several_workers_on_other_links(tmp_path: Path) -> None:
    for name in METHODS:
        write_run(tmp_path / name, name, 0)
    (comparison,) = compare_runs(find_runs([tmp_path]))
    for method in comparison.methods:
        compute = step_seconds(method, 4, None)
        times = [step_seconds(method, 4, link) for link in ("1mbit", "100mbit", "1gbit", "1000gbit")]
        assert compute is not None
        assert None not in times
        assert times == sorted(times, reverse=True)
        assert times[-1] == pytest.approx(compute, rel=0.02)
        # On a very slow link, a step takes as long as its bytes, apart from what is sent after the backward pass has begun.
        wire = 8 * METHODS[method.name][1] / (1e6 * GOODPUT)
        assert times[0] == pytest.approx(wire, abs=compute + 0.01)


def test_a_method_that_sends_nothing_takes_its_computation(tmp_path: Path) -> None:
    results = {"accuracy": 0.9, "seconds_a_step": 0.5, "bytes_a_step": 0.0}
    write_run(tmp_path / "a", "silent", 0, results=results)
    (comparison,) = compare_runs(find_runs([tmp_path]))
    (method,) = comparison.methods
    assert step_seconds(method, 4, "1mbit") == pytest.approx(step_seconds(method, 4, None))


def test_a_run_without_its_dense_step_has_no_time(tmp_path: Path) -> None:
    method = next(m for m in one_device(tmp_path).methods if m.name == "pufferfish")
    assert run_seconds(method, {"pufferfish": 0.1}) is None
    assert run_seconds(method, {"pufferfish": 0.1, "dense": 0.2}) == pytest.approx(40 * 0.2 + 60 * 0.1)


@pytest.mark.parametrize(
    ("name", "others", "warm_up"),
    [
        ("pufferfish", {"dense", "powersgd-4"}, "dense"),
        ("pufferfish+powersgd-4", {"dense", "powersgd-4"}, "powersgd-4"),
        ("pufferfish+powersgd-4", {"dense", "bf16"}, None),
        ("auto(share=0.5)+diloco-30+int4", {"dense", "diloco-30+int4"}, "diloco-30+int4"),
        ("pufferfish+bf16@lars=1.6", {"bf16", "bf16@lars=1.6"}, "bf16@lars=1.6"),
        ("pufferfish@sam", {"dense", "dense@sam"}, "dense@sam"),
        ("pufferfish@sam", {"dense"}, None),
        ("pufferfish+bf16 (a/b)", {"bf16", "bf16 (a/b)"}, "bf16 (a/b)"),
        ("pufferfish+bf16 (a/b)", {"bf16", "bf16 (c)"}, "bf16"),
    ],
)
def test_updates_before_the_switch_have_the_exchange_of_the_method(
    name: str, others: set[str], warm_up: str | None, tmp_path: Path
) -> None:
    results = {"accuracy": 0.9, "updates": 100, "updates_before_change": 40}
    write_run(tmp_path / "a", name, 0, results=results)
    ((method,),) = (comparison.methods for comparison in compare_runs(find_runs([tmp_path])))
    steps = {name: 1.0} | dict.fromkeys(others, 2.0) | ({warm_up: 3.0} if warm_up else {})
    assert run_seconds(method, steps) == (40 * 3.0 + 60 if warm_up else None)


def line(tmp_path: Path, part: str, name: str, accuracy: float, lr: float = 0.4, **more: object) -> str:
    """A line of a file of finished runs, as `BenchLines` writes it."""
    folder = write_run(tmp_path / "runs" / f"{len(list(tmp_path.rglob('run.json')))}", name, 0)
    run = json.loads((folder / "run.json").read_text())
    run["results"]["accuracy"], run["settings"]["recipe"]["lr"] = accuracy, lr
    run["settings"] |= {"measure": "accuracy"}
    return json.dumps(
        {"part": part, "piece": f"runs/{name}/seed-0", "key": "k", "validation": [[1.0, 5, 0.5]]} | run | more
    )


def test_a_file_of_finished_runs_is_reported_by_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line(tmp_path, "one", "dense", 0.1, key="of other settings"),
        line(tmp_path, "one", "pufferfish", 0.2, lr=0.9),
        line(tmp_path, "one", "dense", 0.91),
        line(tmp_path, "one", "pufferfish", 0.92),
        line(tmp_path, "one", "dense", 0.3, piece="tune/dense/lr-0.1"),
        line(tmp_path, "two", "dense", 0.81),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(lines) + "\n" + lines[0][:50])  # the last one is being written
    assert main(["report", str(file), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "## Comparison of methods (one, cifar10, 4 workers on 4 hosts" in text
    assert "## Comparison of methods (two, cifar10" in text
    scores = [row.split(" | ")[2] for row in text.splitlines() if row.endswith("| 1 |")]
    assert scores == ["91.00", "92.00", "81.00"]
    assert main(["report", str(tmp_path / "none.jsonl"), "--markdown"]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
