"""Tasks under DDP, in real processes."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from processes import in_processes
from pufferfish.lab.tasks import Recipe

RECIPE = Recipe(epochs=1, batch=8, lr=0.1, label_smoothing=0.1)


def cases(rank: int, size: int, folder: Path) -> None:
    for name in ("wikitext2", "multi30k", "digits"):
        case = tiny.TINY[name]
        task, data = case.task, case.task.load(folder)
        torch.manual_seed(0)
        model = case.model()
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        if name != "digits":  # its batch norms see a worker's own images
            gradients_are_those_of_the_whole_batch(case, data, model, ddp, rank, size)
        if rank == 0:  # alone: nobody answers it
            for net in (ddp, model):
                net.train()
            assert task.evaluate(ddp, data, "valid") == task.evaluate(ddp.module, data, "valid")
            assert ddp.training
            assert ddp.module.training


def gradients_are_those_of_the_whole_batch(
    case: tiny.Tiny, data: object, model: nn.Module, ddp: nn.Module, rank: int, size: int
) -> None:
    for net, where in ((model, {}), (ddp, {"rank": rank, "size": size})):
        batches = case.task.batches(data, "train", 8, generator=torch.Generator(), **where)
        for batch in islice(batches, 3):
            case.task.loss(net, batch, RECIPE).backward()
    for p, q in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.timeout(120)
def test_two_workers(tmp_path: Path) -> None:
    tiny.wikitext2(tmp_path)
    tiny.multi30k(tmp_path)
    in_processes(cases, 2, tmp_path)
