"""The FSDP2 hook, in four real processes on gloo: two replicas of two shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_state
import torch
import torch.distributed as dist
from sharding import (
    METHODS,
    Net,
    equal,
    gradients_are_those_of_simulated_workers,
    grads,
    hooked,
    loss,
    sharded,
    tensors,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import momentum

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import (
    DGC,
    QSGD,
    BFloat16,
    NoCompression,
    RandomK,
    Settings,
    Signum,
    TopK,
)
from pufferfish.compression.fsdp2_hook import compress_fsdp2


def no_compression_is_plain_averaging(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Equal to FSDP's own 2-D mesh, and to one process with the data of all workers."""
    (model, hook), native, plain = hooked(mesh, NoCompression()), sharded(mesh), Net()
    for step in range(3):
        for x in (model, native, plain):
            x.zero_grad()
        loss(model, step, rank).backward()
        loss(native, step, rank).backward()
        (sum(loss(plain, step, r) for r in range(4)) / 4).backward()
        for p, q, r in zip(model.parameters(), native.parameters(), plain.parameters(), strict=True):
            if r.grad is None:
                assert p.grad is None
                continue
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())
            torch.testing.assert_close(p.grad.full_tensor(), r.grad)
    # Rows are divided between the shards, and padded: 6 of 11, 7 of 13, 3 of 5, 2 of 3.
    numels = {"first": 6 * 7, "b0": 7 * 12, "b1.0": 7 + 7 + 3 * 14, "(root)": 2 * 6}
    assert hook.meter.gradient_bytes == 3 * 4 * sum(numels.values())
    assert hook.state_dict()["modules"].keys() == numels.keys()


def shards_draw_their_own_numbers(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model, _ = hooked(mesh, RandomK(0.5, scale=True))
    loss(model, 0, rank).backward()
    chosen = (grads(model)["b0._checkpoint_wrapped_module.0.weight"][:6] != 0).float()
    everyone = [torch.empty_like(chosen) for _ in range(4)]
    dist.all_gather(everyone, chosen)
    assert torch.equal(everyone[rank], everyone[(rank + 2) % 4])
    assert not torch.equal(everyone[0], everyone[1])


def several_passes(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """A postponed exchange equals that of the sum of the losses in one pass."""
    (wait, hook), (once, _) = (hooked(mesh, TopK(0.1)) for _ in range(2))
    for step in range(3):
        wait.zero_grad()
        wait.set_requires_gradient_sync(False)
        loss(wait, 2 * step, rank).backward()
        wait.set_requires_gradient_sync(True)
        loss(wait, 2 * step + 1, rank).backward()
        once.zero_grad()
        (loss(once, 2 * step, rank) + loss(once, 2 * step + 1, rank)).backward()
        for n, g in grads(once).items():
            torch.testing.assert_close(grads(wait)[n], g)
    assert hook.meter.messages == 3 * 4 * 2  # steps, modules; flags beside values and indices


def unchanged(now: dict[str, dict[str, Tensor]], before: dict[str, dict[str, Tensor]]) -> bool:
    """Whether all state is as before, or zero where there was none."""
    return now.keys() == before.keys() and all(
        torch.equal(x, before[name].get(key, torch.zeros_like(x)))
        for name, state in now.items()
        for key, x in state.items()
    )


def bad_steps_leave_no_trace(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """One row of one shard of one module is infinite on one worker: no worker keeps anything of the step."""
    for name in ("topk", "signum"):
        model, hook = hooked(mesh, METHODS[name])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, bad in enumerate([True, False, True, False]):  # also before anything is tensors
            before, start = tensors(hook), weights(model)
            scaler.scale(loss(model, step, rank, spoil=math.inf if bad and rank == 3 else 1.0)).backward()
            found = grads(model)
            poisoned = bad and mesh["shard"].get_local_rank() == 0
            assert bool(found["first.weight"].isnan().all()) == poisoned, (name, step)
            assert found["b1.1.weight"].isfinite().all()
            assert unchanged(tensors(hook), before) == bad, (name, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
            assert bool(norm.isfinite()) == (not bad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(weights(model), start) == bad
        assert scaler.get_scale() == 1.0
        assert same_everywhere(weights(model))
        assert {module["state"]["steps"] for module in hook.state_dict()["modules"].values()} == {4}


def bad_shards_become_zero(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model, hook = hooked(mesh, TopK(0.1), nonfinite="zero")
    loss(model, 0, rank).backward()
    before = tensors(hook)
    model.zero_grad()
    loss(model, 1, rank, spoil=math.inf if rank == 3 else 1.0).backward()
    first = mesh["shard"].get_local_rank() == 0
    assert bool((grads(model)["first.weight"] == 0).all()) == first
    assert torch.equal(before["first"]["error"], tensors(hook)["first"]["error"]) == first
    assert not torch.equal(before["b1.0"]["error"], tensors(hook)["b1.0"]["error"])


def one_module(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Only the outermost: its exchange begins when the backward pass is over."""
    net = Net()
    fully_shard(net, mesh=mesh["shard"])
    hook = pf.compress(net, replicas=mesh["replicate"].get_group())
    assert hook.method == BFloat16()
    loss(net, 0, rank, spoil=math.inf if rank == 3 else 1.0).backward()
    assert bool(grads(net)["head.weight"].isnan().all()) == (mesh["shard"].get_local_rank() == 0)
    assert list(hook.state_dict()["modules"]) == ["(root)"]


def refusals(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    replicas = mesh["replicate"].get_group()

    def refused(
        words: str,
        model: nn.Module,
        method: Any = None,
        group: Any = replicas,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        hooks = hooks_of(model)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            pf.compress(model, method, replicas=group, optimizer=optimizer, settings=Settings(**options))
        assert hooks_of(model) == hooks  # unchanged

    with pytest.raises(TypeError, match="a Net is not sharded; apply fully_shard"):
        compress_fsdp2(Net(), lambda: Settings(BFloat16()), replicas)
    refused(
        r"Replicate\(\), Shard\(dim=0\).*pass only the 1-D mesh\[\"shard\"\] to fully_shard", sharded(mesh)
    )
    model = sharded(mesh["shard"])
    refused(r"replicas=2 is not a process group; .*mesh\[", model, group=2)
    refused(r"holds another shard of this replica", model, group=dist.group.WORLD)
    refused(r"holds another shard of this replica", model, group=mesh["shard"].get_group())
    refused("smallest too unless the method is for matrices", model, TopK(), smallest=0)
    refused("pattern 'first.weight' matches no module", model, {"first.weight": TopK()})
    refused("QSGD works without error feedback", model, QSGD(), error_feedback=True)
    refused("QSGD works without error feedback", model, QSGD(), error_feedback=True if rank == 0 else None)
    refused(
        "TopK does not support exchange='all_to_all'; it supports all_gather",
        model,
        TopK(),
        exchange="all_to_all",
    )
    refused('neither "nan" nor "zero"', model, nonfinite="inf")
    refused("differ from rank 0 in", model, TopK(0.2 if rank == 2 else 0.1))
    refused("differ from rank 0 in", model, TopK(0.2 if rank % 2 else 0.1))
    for method in (DGC(), Signum()):
        refused("first: .* and so does the SGD", model, {"first": method}, optimizer=momentum(model))
    uneven = Net()
    if mesh["replicate"].get_local_rank():
        uneven.first = nn.Linear(6, 13)
    refused("differ from rank 0 in", sharded(mesh["shard"], uneven))
    plain = torch.optim.SGD(model.parameters())
    hook = pf.compress(model, {"first": DGC()}, replicas=replicas, optimizer=plain)
    assert hook.method == {"first": DGC()}
    refused("already compressed; call use", model)
    other = sharded(mesh["shard"])
    other.b0.set_all_reduce_hook(lambda flat: None)
    refused("b0 already has an all-reduce hook", other)


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        m._get_fsdp_state()._fsdp_param_group._all_reduce_hook
        for m in model.modules()
        if isinstance(m, FSDPModule)
    ]


def on_mesh(rank: int, size: int, case: Callable[..., None], *args: Any, **options: Any) -> None:
    case(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), rank, *args, **options)


def every_method(mesh: DeviceMesh, rank: int, case: Callable[..., None], names: tuple[str, ...]) -> None:
    for name in names:
        case(mesh, rank, name)


def without_error_feedback(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    gradients_are_those_of_simulated_workers(mesh, rank, "topk", error_feedback=False)


def single_worker(rank: int, size: int, device: str) -> None:
    """One replica of one shard, reduced in bf16, whose memory FSDP frees early: the gradients of a plain model."""
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("replicate", "shard"))
    plain = Net().to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = sharded(mesh["shard"], Net().to(device), mp_policy=policy)
    method = {"b0": TopK(0.5), "*": TopK(1.0)}
    hook = compress_fsdp2(model, lambda: Settings(method), mesh["replicate"].get_group())
    for step in range(4):
        before = tensors(hook)
        for net in (model, plain):
            net.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device)
            net(x, spoil=math.inf if step == 2 and net is model else 1.0).square().mean().backward()
        assert equal(tensors(hook), before) == (step == 2)
        for n, p in plain.named_parameters():
            if p.grad is not None and not n.startswith(("b0", "first") if step == 2 else "b0"):
                torch.testing.assert_close(grads(model)[n], p.grad, rtol=1e-2, atol=1e-3)
    assert hook.meter.seconds["encode"] > 0


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_on_a_gpu(tmp_path: Path) -> None:
    in_processes(single_worker, 1, "cuda", backend="nccl")


#: One method for each kind of message and state, in groups that share a test; the DDP tests have them all.
GROUPS = (("none", "topk", "several"), ("signum", "int8"))
REST = tuple(name for name in METHODS if not any(name in group for group in GROUPS))


@pytest.mark.timeout(180)  # against deadlocks
@pytest.mark.parametrize("names", [*GROUPS, pytest.param(REST, marks=pytest.mark.slow)], ids=", ".join)
def test_every_method(names: tuple[str, ...]) -> None:
    in_processes(on_mesh, 4, every_method, gradients_are_those_of_simulated_workers, names)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "names",
    [("int8",), pytest.param(("topk", "dgc", "qsgd", "several"), marks=pytest.mark.slow)],
    ids=", ".join,
)
def test_resumes(names: tuple[str, ...]) -> None:
    in_processes(on_mesh, 4, every_method, sharded_state.resumes, names)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case",
    [
        without_error_feedback,
        no_compression_is_plain_averaging,
        shards_draw_their_own_numbers,
        several_passes,
        bad_steps_leave_no_trace,
        bad_shards_become_zero,
        one_module,
        refusals,
        *sharded_state.CASES,
    ],
)
def test_two_replicas_of_two_shards(case: Callable[..., None], tmp_path: Path) -> None:
    in_processes(on_mesh, 4, case, tmp_path)
