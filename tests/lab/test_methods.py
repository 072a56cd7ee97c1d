"""The table of compression methods: known compression ratios, and the same traffic as simulated workers."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes
from pufferfish.compression import (
    QSGD,
    BFloat16,
    BlockInt8,
    BlockRandomK,
    Int2,
    Int4,
    LoCo,
    Method,
    NoCompression,
    PowerSGD,
    Settings,
    SignSGD,
    Simulated,
    SparseLoCo,
    Threshold,
    TopK,
)
from pufferfish.lab.method_name import method_words, written
from pufferfish.lab.report.methods_table import (
    SIGMA,
    all_methods,
    compression_table,
    methods_parts,
    step_traffic,
)

GUIDE = Path(__file__).parents[2] / "docs" / "compression.md"


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("size", [2, 5])
def test_one_worker_counts_what_simulated_workers_count(method: Method, size: int) -> None:
    shape = (48, 80)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * SIGMA
    simulated = Simulated(Settings(method, smallest=0), size)
    simulated.average([{"w": gradient}] * size)
    one, real = step_traffic(method, size, shape), simulated.meter
    assert one.collective_bytes == real.collective_bytes
    assert (one.messages, one.wire_bytes) == (real.messages, real.wire_bytes)


@pytest.mark.parametrize(
    ("method", "feedback", "bits", "ratios"),
    [
        (NoCompression(), "no", ["all-reduce", "32"], [1, 1, 1]),
        (BFloat16(), "no", ["all-reduce", "16"], [2, 2, 2]),
        (TopK(0.01), "yes", ["all-gather", "0.64"], [50, 12.5, 1.56]),
        (SignSGD(), "no", ["all-to-all", "1", "+", "all-gather", "0.5"], [32, 32, 32]),
        (BlockInt8(), "yes", ["all-to-all", "8.12", "+", "all-gather", "4.06"], [3.94, 3.94, 3.94]),
        (BlockRandomK(0.01, "own"), "yes", ["all-gather", "0.32"], [100, 25, 3.12]),
        (BlockRandomK(0.01, "shared"), "yes", ["all-reduce", "0.32"], [100, 100, 100]),
        (PowerSGD(4), "yes", ["all-reduce", "0.25"], [128, 128, 128]),
        (PowerSGD(4, start=9), "yes", ["all-reduce", "0.25"], [128, 128, 128]),
        (QSGD(), "no", ["all-to-all", "4.06", "+", "all-gather", "2.03"], [7.88, 7.88, 7.88]),
        (Int4(), "yes", ["all-to-all", "4.12", "+", "all-gather", "2.06"], [7.76, 7.76, 7.76]),
        (Int2(), "yes", ["all-to-all", "2.12", "+", "all-gather", "1.06"], [15.1, 15.1, 15.1]),
        (LoCo(), "own", ["all-to-all", "4.12", "+", "all-gather", "2.06"], [7.76, 7.76, 7.76]),
        (SparseLoCo(), "yes", ["all-gather", "0.225"], [142, 35.6, 4.45]),
        (Threshold(), "yes", ["all-gather", "0.318"], [101, 25.1, 3.14]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Method) else "",
)
def test_known_figures(method: Method, feedback: str, bits: list[str], ratios: list[float]) -> None:
    row = str(compression_table([method], [2, 8, 64])).splitlines()[1]
    assert row.startswith(written(method))
    assert row.removeprefix(written(method)).split() == [feedback, *bits, *(f"{x:g}" for x in ratios)]


def test_all_methods_are_shown_unless_some_are_named() -> None:
    assert [type(method) for method in all_methods()] == list(method_words().values())
    models, _, steps, table, _ = map(str, methods_parts([]))
    assert "pufferfish" in models
    assert "diloco(30)" in steps
    assert [line.split("(")[0].split()[0] for line in table.splitlines()[1:]] == list(method_words())
    bf16, dgc, *rest = map(str, methods_parts(["bf16", "pufferfish+dgc"], workers=[4]))
    assert "compressed by bf16" in bf16
    assert "low rank" in dgc
    lines = "\n\n".join(rest).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["method", "bf16"]
    assert " own " in lines[2]
    assert lines[0].endswith("4 workers")
    assert "one of 4 workers" in " ".join(lines[3:])


def test_a_job_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="--workers 1: one worker sends nothing"):
        methods_parts(["topk"], workers=[2, 1])


def test_the_guide_shows_what_the_command_prints() -> None:
    shown = re.findall(r"^\| `(.*?)` \| (\w+ \| .*-.* \| .*) \|$", GUIDE.read_text(), re.MULTILINE)
    assert len(shown) > 15
    for text, cells in shown:
        method = eval(text, dict(vars(pf.compression)))
        method = method() if isinstance(method, type) else method
        row = str(compression_table([method], [2, 8, 64])).splitlines()[1].removeprefix(written(method))
        assert re.split(r"\s{2,}", row.strip()) == cells.split(" | "), text


def _the_guides_code(rank: int, size: int) -> None:
    ddp = DDP(nn.Sequential(OrderedDict(embed=nn.Linear(40, 40), head=nn.Linear(40, 40))))
    user: dict[str, Any] = {"pf": pf, "ddp": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.1)}
    for snippet in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(snippet, user)
    ddp(torch.ones(1, 40)).sum().backward()
    assert user["hook"].meter.steps == 1


@pytest.mark.timeout(60)
def test_the_guides_code_runs(tmp_path: Path) -> None:
    in_processes(_the_guides_code, 1)
