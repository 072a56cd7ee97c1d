"""Tasks under DDP, in real processes."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from processes import in_processes
from pufferfish.lab.tasks import Recipe

RECIPE = Recipe(epochs=1, batch=8, lr=0.1, label_smoothing=0.1)


def wrap(name: str, folder: Path) -> tuple[tiny.Tiny, Any, nn.Module, nn.Module]:
    case = tiny.TINY[name]
    torch.manual_seed(0)
    model = case.model()
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    return case, case.task.load(folder), model, ddp


def gradients_match_the_global_batch(rank: int, size: int, name: str, folder: Path) -> None:
    case, data, model, ddp = wrap(name, folder)
    for net, order in ((model, {}), (ddp, {"worker": rank, "world_size": size})):
        batches = case.task.batches(data, "train", 8, generator=torch.Generator(), **order)
        for batch in islice(batches, 3):
            case.task.loss(net, batch, RECIPE).backward()
    for p, q in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def one_worker_evaluates(rank: int, size: int, name: str, folder: Path) -> None:
    case, data, _, ddp = wrap(name, folder)
    if rank == 0:  # the other worker does not take part
        ddp.train()
        assert case.task.evaluate(ddp, data, "valid") == case.task.evaluate(ddp.module, data, "valid")
        assert ddp.training
        assert ddp.module.training


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        # Not "digits": its batch norm sees a worker's own images.
        *((gradients_match_the_global_batch, name) for name in ("wikitext2", "multi30k", "enwik8")),
        *((one_worker_evaluates, name) for name in ("wikitext2", "multi30k", "digits")),
    ],
)
def test_in_real_processes(case: Any, name: str, tmp_path: Path) -> None:
    tiny.TINY[name].write(tmp_path)
    in_processes(case, 2, name, tmp_path)
