"""Local steps in real processes on gloo, compared with a plain sequential implementation."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_workers import adamw, batch, build, close, diloco, floats, sequential, sgd, started, train, update
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import pufferfish as pf
from nested import equal
from processes import in_processes, same_everywhere
from pufferfish.compression import BFloat16, BlockInt8, Settings, Simulated, TopK
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
    for method in (TopK(0.05), BlockInt8(64), {"3": TopK(0.05), "*": BlockInt8(64)}):
        local = LocalSteps(2, outer=diloco, method=method)
        model, optimizer = started(local)
        train(local, model, optimizer, range(6), rank)
        workers_agree(model)

        workers = [build() for _ in range(size)]
        optimizers = [sgd(worker.parameters()) for worker in workers]
        anchor = build()
        outer = diloco(anchor.parameters())
        trained = dict(anchor.named_parameters()).keys()
        simulated = Simulated(Settings(method), size)
        for step in range(6):
            for i in range(size):
                update(workers[i], optimizers[i], step, i)
            if step % 2:
                start, ends = floats(anchor), [floats(worker) for worker in workers]
                means = simulated.average([{n: start[n] - end[n] for n in trained} for end in ends])
                for name, p in anchor.named_parameters():
                    p.grad = means[0][name]
                outer.step()
                for name in start.keys() - trained:
                    anchor.get_buffer(name).copy_(torch.stack([end[name] for end in ends]).mean(0))
                for worker in workers:
                    worker.load_state_dict(floats(anchor), strict=False)
        close(model, workers[0])


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


def resumes_exactly(rank: int, size: int, folder: str) -> None:
    """Saved by every worker with `weights_only`, between two averages and at one."""
    for stop in (2, 5, 6):
        for method in (None, TopK(0.05)):
            runs = []
            for interrupted in (False, True):
                local = LocalSteps(3, outer=diloco, method=method)
                model, optimizer = started(local, adamw, seed=1)
                train(local, model, optimizer, range(stop), rank)
                if interrupted:
                    file = io.BytesIO()
                    torch.save((model.state_dict(), optimizer.state_dict(), local.state_dict()), file)
                    file.seek(0)
                    saved = torch.load(file, weights_only=True)
                    model = build(seed=9)
                    local, optimizer = LocalSteps(3, outer=diloco, method=method), adamw(model.parameters())
                    if stop == 5:
                        local.start(model)  # before or after loading makes no difference
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                    local.load_state_dict(saved[2])
                    equal(local.state_dict(), saved[2])
                    if stop != 5:
                        local.start(model)
                assert train(local, model, optimizer, range(stop, 10), rank)[-1] == 9
                runs.append((model.state_dict(), local.state_dict()))
            equal(runs[0], runs[1])


def restarts_after_a_switch(rank: int, size: int, folder: str) -> None:
    local = LocalSteps(3, outer=diloco, method=TopK(0.05))
    switch = pf.Switch(rank=pf.Fixed(4), when=pf.AtEpoch(1))
    model, optimizer = started(local, adamw)
    outer = local.outer
    for epoch in range(2):
        assert local.sync(model) == (epoch == 1)
        if switch.step(model, optimizer, epoch=epoch):
            before = {n: x.clone() for n, x in momenta(local).items()}
            local.start(model)
            after = momenta(local)
            assert after.keys() == before.keys() & dict(model.named_parameters()).keys()
            assert all(torch.equal(after[name], before[name]) for name in after)
        train(local, model, optimizer, range(4 * epoch, 4 * epoch + 4), rank)
    assert local.outer is outer
    local.sync(model)
    workers_agree(model)
    assert momenta(local).keys() == dict(model.named_parameters()).keys()
    assert switch.report is not None


def momenta(local: LocalSteps) -> dict[str, Tensor]:
    return {name: x["momentum_buffer"] for name, x in local.state_dict()["outer"]["state"].items()}


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


def counts_bytes(rank: int, size: int, folder: str) -> None:
    """One message per average, whatever h; buffers are sent uncompressed."""
    for method, each in ((None, 4), (BFloat16(), 2)):
        local = LocalSteps(4, method=method)
        model, optimizer = started(local)
        train(local, model, optimizer, range(8), rank)
        parameters = sum(p.numel() for p in model.parameters())
        tensors = floats(model)
        others = (
            sum(x.numel() for x in tensors.values()) - parameters + len(tensors) + 1
        )  # and who is finite, in use
        assert local.meter.steps == 2
        assert local.meter.collective_bytes["all_reduce"] == 2 * (each * parameters + 4 * others)
        assert local.meter.wire_bytes == local.meter.collective_bytes["all_reduce"] * 2 * (size - 1) / size


def ddp_inside_machines(rank: int, size: int, folder: str) -> None:
    """DDP inside two machines of two processes, local steps between them: two workers with twice the batch."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = build(seed=rank)
    model[1].eval()
    local = LocalSteps(2, outer=diloco, group=between)
    ddp, optimizer = DDP(model, process_group=inside), sgd(model.parameters())
    local.start(model)
    for step in range(4):
        update(ddp, optimizer, step, rank)
        local.step(model)
    workers_agree(model)

    workers = [build() for _ in range(2)]
    optimizers = [sgd(worker.parameters()) for worker in workers]
    anchor = build()
    outer = diloco(anchor.parameters())
    for step in range(4):
        for i, worker in enumerate(workers):
            worker[1].eval()
            pairs = [batch(step, 2 * i + j) for j in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            nn.functional.cross_entropy(worker(x), y).backward()
            optimizers[i].step()
            optimizers[i].zero_grad()
        if step % 2:
            for a, p, q in zip(anchor.parameters(), *[w.parameters() for w in workers], strict=True):
                a.grad = a.detach() - (p.detach() + q.detach()) / 2
            outer.step()
            for worker in workers:
                worker.load_state_dict(anchor.state_dict())
    close(model, workers[0])


def checkpointed_between_two_averages(rank: int, size: int, folder: str) -> None:
    """Every worker restores its own weights and moments."""
    ends = []
    for stops in ((9,), (5, 9)):
        for stop in stops:
            model, local = build(seed=rank), LocalSteps(3, outer=diloco, method=TopK(0.05))
            optimizer = adamw(model.parameters())
            with pf.Checkpoint(f"{folder}/{len(stops)}", model, optimizer, compressor=local) as checkpoint:
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
    resumes_exactly,
    restarts_after_a_switch,
    a_difference_between_workers_is_an_error,
    counts_bytes,
    checkpointed_between_two_averages,
    a_checkpoint_has_all_that_differs_between_workers,
]
FOUR_WORKERS = [
    equals_a_sequential_implementation,
    ddp_inside_machines,
]  # a mean of more than two; two levels


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 2) for case in CASES),
        *((case, 4) for case in FOUR_WORKERS),
        *(pytest.param(case, 4, marks=pytest.mark.slow) for case in CASES if case not in FOUR_WORKERS),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[..., None], size: int, tmp_path: Path) -> None:
    in_processes(case, size, str(tmp_path))
