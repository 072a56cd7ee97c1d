"""Workers that fall out of step: the error names the operation. Real processes on gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import forked
from pufferfish.compression import PowerSGD, TopK
from pufferfish.distributed import workers
from pufferfish.distributed.workers import LostContact


def build() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


def fail_soon() -> None:
    """Let collectives of this job fail after a second, from now on: until here workers may be slow."""
    dist.barrier()
    world = dist.group.WORLD
    for group in (world, workers._beside[world]()):
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))


def lost(words: str, work: Callable[[], object]) -> None:
    """Check that `work` loses contact, with torch's error as the cause."""
    with pytest.raises(LostContact, match=words) as caught:
        work()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not isinstance(caught.value.__cause__, LostContact)


def one_worker_exits_before_the_switch(rank: int, folder: Path) -> None:
    ddp = build()
    optimizer, switch = sgd(ddp), pf.Switch(rank=0.25, when=pf.AtStep(1))
    switch.step(ddp, optimizer, step=0)
    fail_soon()
    if rank == 0:
        lost(
            r"^switch.step: worker 0 lost contact with the others after \d+ s: a worker has exited",
            lambda: switch.step(ddp, optimizer, step=1),
        )
        assert not switch.low_rank


def one_worker_changes_the_method(rank: int, folder: Path) -> None:
    """Also where both workers wait in an all-gather, one for a few bytes and one for a gradient."""
    ddp = build()
    hook = pf.compress(ddp, TopK(0.1))
    for _ in range(2):  # DDP itself communicates before the second one
        backward(ddp)
    fail_soon()
    if rank == 0:
        lost("^hook.use: worker 0 lost contact", lambda: hook.use(PowerSGD(1)))
    else:
        lost("^the exchange of gradients: worker 1 lost contact", lambda: backward(ddp))


def one_call_of_checkpoint_is_missing(rank: int, folder: Path) -> None:
    """The worker that has made more calls finds out during the next step; the other one waits for its gradients."""
    ddp = build()
    optimizer = sgd(ddp)
    with pf.Checkpoint(folder / "checkpoints", ddp, optimizer) as checkpoint:
        for step in (1, 2):
            backward(ddp)
            optimizer.step()
            if rank == 0 or step == 1:
                checkpoint.step(step=step)
        words = r"out of step: worker 0 in checkpoint\.step\(2\) .*; worker 1 in checkpoint\.step\(3\)"

        def go_on() -> None:
            for step in (3, 4):
                backward(ddp)
                checkpoint.step(step=step)

        with pytest.raises(RuntimeError, match=words if rank == 0 else None):
            go_on()


def one_worker_of_a_sharded_model_exits(rank: int, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    pf.compress(model)
    model(torch.ones(2, 8)).sum().backward()
    fail_soon()
    if rank == 0:
        lost("^the gather of the parameters of 0: worker 0 lost contact", lambda: model(torch.ones(2, 8)))


def _worker(rank: int, case: Callable[..., None], folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    case(rank, folder)
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    "case",
    [
        one_worker_exits_before_the_switch,
        one_worker_changes_the_method,
        one_call_of_checkpoint_is_missing,
        one_worker_of_a_sharded_model_exits,
    ],
)
def test_one_worker_is_elsewhere(case: Callable[..., None], tmp_path: Path) -> None:
    forked(_worker, 2, (case, tmp_path), limit=60, name=case.__name__)
