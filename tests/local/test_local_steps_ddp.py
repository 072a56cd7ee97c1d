"""Local steps in real processes on gloo, compared with a plain sequential implementation."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_workers import adamw, batch, build, close, diloco, floats, sequential, sgd, started, train, update
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import pufferfish as pf
from nested import equal
from processes import in_processes, same_everywhere
from pufferfish.compression import Accordion, BlockInt8, Int2, PowerSGD, SparseLoCo, TopK
from pufferfish.local.local_steps import LocalSteps


def workers_agree(model: nn.Module) -> None:
    for name, x in model.state_dict().items():
        assert same_everywhere(x), name


def h_of_one_equals_ddp(rank: int, size: int, folder: str) -> None:
    model, other = build(), build()
    for net in (model, other):
        net[1].eval()  # DDP does not average its statistics
    ddp, local = DDP(other), LocalSteps(1)
    optimizers = [sgd(net.parameters()) for net in (model, other)]
    local.start(model)
    for step in range(4):
        update(model, optimizers[0], step, rank)
        assert local.step(model)
        update(ddp, optimizers[1], step, rank)
        workers_agree(model)
    close(model, other)


def equals_a_sequential_implementation(rank: int, size: int, folder: str) -> None:
    nesterov = {"lr": 0.7, "momentum": 0.9}
    for h, make, outer, settings in (
        (1, adamw, None, {}), (3, sgd, None, {}), (3, adamw, diloco, nesterov), (2, sgd, diloco, nesterov),
    ):  # fmt: skip
        local = LocalSteps(h, outer=outer)
        model, optimizer = started(local, make, seed=rank)  # start broadcasts rank 0's weights
        assert train(local, model, optimizer, range(6), rank) == list(range(h, 7, h))
        workers_agree(model)
        close(model, sequential(size, h, 6, make, **settings))


def starts_from_rank_zero(rank: int, size: int, folder: str) -> None:
    model = build(seed=rank).to(memory_format=torch.channels_last)
    model[1].running_mean += rank
    model[1].num_batches_tracked += rank
    model[3].weight.requires_grad_(False)  # not averaged, but broadcast at the start
    model.register_buffer("mask", torch.tensor([[True, False]]) if rank else torch.tensor([[False, False]]))
    LocalSteps(2).start(model)
    workers_agree(model)
    assert torch.equal(model[3].weight, build()[3].weight)


def compression_equals_simulated_workers(rank: int, size: int, folder: str) -> None:
    """Real workers average to the same result as simulated ones with the same method."""
    nesterov = {"lr": 0.7, "momentum": 0.9}
    for method, outer, settings in (
        (TopK(0.05), diloco, nesterov), (BlockInt8(64), diloco, nesterov), (Int2(64), diloco, nesterov),
        ({"3": TopK(0.05), "*": BlockInt8(64)}, diloco, nesterov), (SparseLoCo(k=4, chunk=64), None, {}),
        (Accordion(PowerSGD(2), PowerSGD(1), every=1), diloco, nesterov),
    ):  # fmt: skip
        local = LocalSteps(2, outer=outer, method=method)
        model, optimizer = started(local)
        train(local, model, optimizer, range(6), rank)
        workers_agree(model)
        close(model, sequential(size, 2, 6, sgd, **settings, method=method))


def a_round_that_is_not_finite_is_discarded(rank: int, size: int, folder: str) -> None:
    local = LocalSteps(2, outer=diloco, method={"3": TopK(0.1)})
    model, optimizer = started(local)
    train(local, model, optimizer, range(2), rank)
    before, state_before = floats(model), copy.deepcopy(local.state_dict())
    for where in ("3.weight", "1.running_var"):
        update(model, optimizer, 2, rank)
        local.step(model)
        if rank == size - 1:
            model.state_dict()[where][0] = math.nan
        source = "this worker" if rank == size - 1 else "another worker"
        with pytest.warns(RuntimeWarning, match=f"the model of {source} is not finite"):
            assert local.step(model)
        for name, x in floats(model).items():
            assert torch.equal(x, before[name]), name
    state = local.state_dict()
    assert state["lost"] == 2
    equal(state["outer"], state_before["outer"])
    equal(state["fragments"][0]["engine"]["own"], state_before["fragments"][0]["engine"]["own"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(local, model, optimizer, range(3, 5), rank)
    workers_agree(model)
    assert any(not torch.equal(x, before[name]) for name, x in floats(model).items())


def a_difference_between_workers_is_an_error(rank: int, size: int, folder: str) -> None:
    last = rank == size - 1
    for different in (
        lambda: LocalSteps(3 if last else 2).start(build()),
        lambda: LocalSteps(2, method=TopK() if last else None).start(build()),
        lambda: LocalSteps(2).start(nn.Linear(2, 3 if last else 2)),
    ):
        with pytest.raises(
            RuntimeError, match=rf"LocalSteps.start: ranks \[{size - 1}\] differ from rank 0 in h"
        ):
            different()
    ddp = DDP(build())
    with pytest.raises(TypeError, match=rf"rank {size - 1}: .*already averages every gradient"):
        LocalSteps(2).start(ddp if last else ddp.module)
    sharded = build()
    fully_shard(sharded)
    with pytest.raises(TypeError, match=r"0\.weight is a DTensor"):
        LocalSteps(2).start(sharded)
    model = build()
    model[1].eval()  # its counter would differ too
    local, optimizer = LocalSteps(4), sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(3 if last else 2), rank)
    with pytest.raises(RuntimeError, match="differ from rank 0 in the number of updates"):
        local.sync(model)
    if not last:
        train(local, model, optimizer, range(2, 3), rank)
    if last:
        model[3] = nn.Linear(40, 41)
    with pytest.raises(ValueError, match=rf"rank {size - 1}: .*3\.weight is 41×40"):
        local.sync(model)
    if last:
        model[3] = build()[3]
    assert local.sync(model)  # the job can continue
    workers_agree(model)


def checkpointed_between_two_averages(rank: int, size: int, folder: str) -> None:
    """Every worker restores its own weights and moments, before or after the start."""
    ends = []
    for stops in ((9,), (5, 6, 9)):
        for stop in stops:
            model, local = build(seed=rank), LocalSteps(3, outer=diloco, method=TopK(0.05))
            optimizer = adamw(model.parameters())
            with pf.Checkpoint(f"{folder}/{len(stops)}", model, optimizer, compressor=local) as checkpoint:
                if stop == 9:
                    local.start(model)
                at = checkpoint.resume()
                local.start(model)
                train(local, model, optimizer, range(at.position["step"] if at else 0, stop), rank)
                checkpoint.save(step=stop)
        ends.append((model.state_dict(), local.state_dict()))
    equal(ends[0], ends[1])


def a_checkpoint_has_all_that_differs_between_workers(rank: int, size: int, folder: str) -> None:
    """Averages, the scale of the loss and the learning rate: one worker skips an update, and its loss does not fall."""

    def start() -> tuple[Any, ...]:
        model = build(seed=0)
        optimizer, local = sgd(model.parameters()), LocalSteps(4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        average = AveragedModel(model)
        checkpoint = pf.Checkpoint(
            folder, model, optimizer, also=[average], scaler=scaler, scheduler=plateau, compressor=local
        )
        return local, checkpoint, model, optimizer, average, scaler, plateau

    local, checkpoint, model, optimizer, average, scaler, plateau = parts = start()
    local.start(model)
    for step in range(3):
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if rank and step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
        plateau.step(1.0 if rank else -step)
        local.step(model)
    checkpoint.save(step=3)
    checkpoint.close()
    assert scaler.get_scale() == (512.0 if rank else 2048.0)
    resumed = start()
    resumed[1].resume()
    equal([x.state_dict() for x in resumed[2:]], [x.state_dict() for x in parts[2:]])


CASES = [
    h_of_one_equals_ddp,
    equals_a_sequential_implementation,
    starts_from_rank_zero,
    compression_equals_simulated_workers,
    a_round_that_is_not_finite_is_discarded,
    a_difference_between_workers_is_an_error,
    checkpointed_between_two_averages,
    a_checkpoint_has_all_that_differs_between_workers,
]


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in CASES), (equals_a_sequential_implementation, 4)],  # a mean of more than two
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[..., None], size: int, tmp_path: Path) -> None:
    in_processes(case, size, str(tmp_path))
