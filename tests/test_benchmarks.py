"""Benchmarks take too long to run here; but they can be imported, and the tables of their recorded results are right."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from pufferfish.compression import Settings
from pufferfish.lab.method_name import compression_method
from pufferfish.lab.train.simulated import SimulatedDDP

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
#: Scripts with studies, each of which has a file of results.
STUDIES = ("given", "given_steps", "quality", "sharded", "sharded_quality")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", STUDIES)
def test_all_studies_are_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those without results as well."""
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, "--show", "--results", str(FOLDER / "results")])
    module.main(module.STUDIES)
    tables = capsys.readouterr().out.split("\n\n")
    for study, table in zip(module.STUDIES, tables, strict=True):
        assert table.startswith(f"{study.name}: ")
        if (FOLDER / "results" / f"{study.name}.jsonl").exists():
            assert "not finished" not in table
            assert len(re.findall(r"[+-]\d+\.\d+ ± \d", table)) >= min(2, len(study.arms) - 1)


def test_the_recorded_accidents_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["churn", "--table", str(FOLDER / "results" / "churn.jsonl")])
    assert importlib.import_module("churn").main() == 0
    assert len(re.findall(r"\d\.\d", capsys.readouterr().out)) >= 2


@pytest.mark.parametrize("method", ["bf16", "int8", "loco", "powersgd(2)", "topk(0.01)"])
def test_one_worker_counts_the_bytes_of_four(method: str) -> None:
    given = importlib.import_module("given")
    settings = Settings(compression_method(method))
    model = nn.Linear(256, 512)
    batch = torch.randn(8, 256)
    counted = []
    for workers in (1, 4):
        ddp = SimulatedDDP(model, settings, workers)
        ddp.backward(lambda x: model(x).square().sum(), [(part,) for part in batch.chunk(workers)])
        counted.append(given.wire_bytes(ddp))
    assert counted[1] == pytest.approx(ddp.meter.wire_bytes)
    assert counted[0] == pytest.approx(counted[1], rel=0.01)


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, for a copy of the pages."""
    claims = importlib.import_module("claims")
    for page in claims.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    return claims


def test_the_tables_of_the_pages_are_those_of_the_results(claims: ModuleType) -> None:
    """If this fails: python benchmarks/claims.py --write, and read the text around the table again."""
    assert claims.main([]) == 0


def test_another_figure_is_found_and_written_back(
    claims: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in claims.PAGES:
        path = claims.ROOT / page
        right = path.read_text()
        table = right.index("<!-- claims: ")
        figure = re.search(r"\d\.\d\d", right[table:])
        assert figure
        at = table + figure.start()
        path.write_text(right[:at] + "9" + right[at + 1 :])
        assert claims.main([]) == 1
        assert f"{page}: " in capsys.readouterr().out
        assert claims.main(["--write"]) == 0
        assert path.read_text() == right


def test_all_results_are_on_a_page(claims: ModuleType) -> None:
    pages = "".join((ROOT / page).read_text() for page in claims.PAGES)
    assert [path.name for path in (FOLDER / "results").iterdir() if path.name not in pages] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_table_that_is_not_generated_says_so(claims: ModuleType, page: str) -> None:
    path = claims.ROOT / page
    text = path.read_text()
    for head, code in (("| loss |", 1), ("| loss (0.1.0/0.2.0, raw data not kept) |", 0)):
        table = f"{head}\n|---|\n| 1.25 |\n"
        before, heading, after = text.partition("\n## Support" if page == "README.md" else "\n## Compression")
        path.write_text(f"{before}\n{table}{heading}{after}")
        assert claims.main([]) == code
    path.write_text(text.replace("<!-- claims: ", "<!-- other: ", 1))
    assert claims.main([]) == 1
