"""benchmarks/tables.py: every declared table can be run as declared; the smallest one is run and shown."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pufferfish.lab.bench
from benchmark import benchmark
from pufferfish.cli import main
from pufferfish.lab.bench import BenchSettings
from pufferfish.lab.bench.bench_method import bench_method
from pufferfish.planning.planner import plan

tables = benchmark("tables")
PARTS = [(table, name) for table, parts in tables.TABLES.items() for name in parts]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tables.main` sets these for its processes, if they are not set."""
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(("table", "name"), PARTS)
def test_declared_methods_fit_their_tasks(table: str, name: str) -> None:
    each = tables.TABLES[table][name]
    settings = replace(each.settings, device="cpu", precision="fp32", mode="eager")
    task, recipe = settings.resolve()
    for method in settings.methods:
        parsed = bench_method(method)
        settings.run_settings(method, parsed.recipe(recipe)).check(task, 1)
        low_rank = parsed.method.low_rank
        if low_rank is not None:
            with torch.device("meta"):
                model = task.build()
            found = plan(model, low_rank.rank_of(recipe), keep=low_rank.kept(task.keep))
            assert found.after.parameters < found.before.parameters
    assert {*each.against, *each.published} <= {*settings.methods}
    assert each.seconds < 540  # a run fits into a command of ten minutes
    assert each.settings.mode != "auto"  # it would depend on the device
    short = recipe.override(epochs=settings.tune_epochs)
    if (
        settings.tune and recipe.switch_at and table != "smoke"
    ):  # tuning runs switch at about the same share of the run
        assert abs((short.switch_at or 0) / short.epochs - recipe.switch_at / recipe.epochs) < 0.05
    if task.metric == "bits_per_byte":
        assert settings.tune >= 4


@pytest.mark.parametrize("table", tables.TABLES)
def test_commands_are_the_same_benches(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    called: list[BenchSettings] = []

    def record(settings: BenchSettings, root: Path, **more: Any) -> int:
        called.append(settings)
        return 0

    monkeypatch.setattr(pufferfish.lab.bench, "run_bench", record)
    assert tables.main([table, "--commands"]) == 0
    for line in capsys.readouterr().out.splitlines():
        program, *words = shlex.split(line)
        assert program == "pufferfish"
        assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert called == [each.settings for each in tables.TABLES[table].values()]


@pytest.mark.parametrize("table", tables.TABLES)
def test_what_is_missing_is_shown(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([table, "--show", "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for name, each in tables.TABLES[table].items():
        assert f"# {name}: {each.settings.task}" in shown
    assert shown.count(f"0 of {each.settings.seeds}") >= len(each.settings.methods)


def test_the_cost_of_all_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cost", "--results", str(tmp_path)]
    assert tables.main(["all", *words]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert len(rows) == 2 + sum(len(tables.TABLES[name]) for name in tables.ALL)
    # enwik8: inner rates of six methods, three seeds, five methods at equal time, a width and five lengths
    enwik8 = tables.TABLES["enwik8"]["d512"]
    minutes = (enwik8.seconds * (18 * 3 / 20 + 18 + 15) + 120 + 5 * 30) / 60
    expected = ["enwik8", "d512", "18", "18", "15", "6", f"{enwik8.seconds:.0f}", f"{minutes:.0f}"]
    assert rows[1] == expected
    assert int(rows[-1][-1]) == pytest.approx(sum(int(row[-1]) for row in rows[1:-1]), abs=len(rows))
    readme = (Path(tables.__file__).parent / "README.md").read_text()
    assert shown.strip() in readme


def test_a_part_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main(["seed004", "--part", "3 workers", "--show"])
    message = "--part 3 workers: seed004 has the parts 8 workers, 4 workers, 2 workers"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, ImportError, OSError])
def test_missing_data_concerns_one_table(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    called: list[str] = []

    def bench(settings: BenchSettings, root: Path, **more: Any) -> int:
        called.append(settings.task)
        if settings.task.startswith("enwik8"):
            raise error("enwik8: no data")
        return 0

    monkeypatch.setattr(tables, "run_bench", bench)
    assert tables.main(["all", "--work", str(tmp_path), "--minutes", "1"]) == 1
    assert len(called) == len([name for table in tables.ALL for name in tables.TABLES[table]])
    assert "enwik8, d512: enwik8: no data" in capfd.readouterr().err
    called.clear()
    assert tables.main(["all", "--work", str(tmp_path), "--minutes", "0"]) == 0
    assert called == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_smallest_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["smoke", "--results", str(tmp_path / "results")]
    assert tables.main([*words, "--minutes", "4", "--beside", "2"]) == 0
    lines = (tmp_path / "results" / "smoke.jsonl").read_text().splitlines()
    assert len(lines) == 9  # tuning: 2 × 2, runs: 2 × 2, times: 1
    record = next(x for x in map(json.loads, lines) if x["piece"] == "runs/dense/seed-1")
    assert {"settings", "versions", "hardware", "seed", "validation"} <= {*record}
    assert {"accuracy", "parameters", "macs", "bytes_a_step", "updates", "wall_seconds"} <= {
        *record["results"]
    }
    capsys.readouterr()
    assert tables.main([*words, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "| pufferfish | 4,874 |" in shown
    assert shown.count("2 of 2") == 4
    assert tables.main([*words, "--cost"]) == 0
    assert "digits       0     0           0             0" in capsys.readouterr().out
    assert tables.main([*words, "--work", "elsewhere"]) == 0  # nothing is left to do
    assert (tmp_path / "results" / "smoke.jsonl").read_text().splitlines() == lines
