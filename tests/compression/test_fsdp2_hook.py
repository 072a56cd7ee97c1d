"""Compression between the replicas of a sharded model, in four real processes on gloo: two replicas of two shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_state import state_cases
from sharding import (
    METHODS,
    Net,
    alike,
    grads,
    hooked,
    kept,
    loss,
    sharded,
    train,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import momentum

from processes import in_processes, same_everywhere
from pufferfish.compression import (
    DGC,
    QSGD,
    Accordion,
    Aggregator,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Signum,
    Simulated,
    TopK,
)
from pufferfish.compression.fsdp2_hook import compress_sharded


def no_compression_is_plain_averaging(mesh: DeviceMesh, rank: int) -> None:
    """As FSDP itself does it on the 2-D mesh, and as one process does it with the data of all."""
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
    # Rows are shared out, and filled up: 6 of 11, 7 of 13, 3 of 5, 2 of 3.
    numels = {"first": 6 * 7, "b0": 7 * 12, "b1.0": 7 + 7 + 3 * 14, "(root)": 2 * 6}
    assert hook.meter.gradient_bytes == 3 * 4 * sum(numels.values())
    assert hook.state_dict()["groups"].keys() == numels.keys()


def by_simulated_workers(model: nn.Module, mesh: DeviceMesh, method: Any, **options: Any) -> None:
    """The obvious way: every replica's flat shard goes to all, who simulate both."""
    group, shard = mesh["replicate"].get_group(), mesh["shard"].get_local_rank()
    for name, module in model.named_modules():
        name = name.removesuffix("._checkpoint_wrapped_module") or "(root)"
        if not isinstance(module, FSDPModule) or name == "b1.1":
            continue
        mine = method
        if isinstance(method, dict):
            mine = {"first": method["first"], "(root)": NoCompression()}.get(name, method["b?"])
        aggregator, key = Aggregator(mine, Simulated(2), smallest=0, **options), f"{name}[{shard}/2]"

        def average(flat: Tensor, aggregator: Aggregator = aggregator, key: str = key) -> None:
            everyone = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(everyone, flat, group=group)
            flat.copy_(aggregator.together([{key: x} for x in everyone])[0][key])

        module.set_all_reduce_hook(average)


def gradients_are_the_aggregators(mesh: DeviceMesh, rank: int, name: str, **options: Any) -> None:
    """Two terms have one sum: bit for bit, memories and all."""
    model, hook = hooked(mesh, METHODS[name], seed=3, **options)
    reference = sharded(mesh["shard"])
    by_simulated_workers(reference, mesh, METHODS[name], seed=3, **options)
    for step in range(3):
        for x in (model, reference):
            x.zero_grad()
            loss(x, step, rank).backward()
        found, expected = grads(model), grads(reference)
        assert found.keys() == expected.keys()
        for n, g in found.items():
            assert torch.equal(g, expected[n]), (name, step, n)
    if name in ("topk", "int8", "ef-sign"):
        assert ("memory" in kept(hook)["first"]) == (options.get("memory") is not False)


def shards_draw_their_own_numbers(mesh: DeviceMesh, rank: int) -> None:
    model, _ = hooked(mesh, RandomK(0.5, scale=True))
    loss(model, 0, rank).backward()
    chosen = (grads(model)["b0._checkpoint_wrapped_module.0.weight"][:6] != 0).float()
    everyone = [torch.empty_like(chosen) for _ in range(4)]
    dist.all_gather(everyone, chosen)
    assert torch.equal(everyone[rank], everyone[(rank + 2) % 4])
    assert not torch.equal(everyone[0], everyone[1])


def several_passes(mesh: DeviceMesh, rank: int) -> None:
    """Two ways to wait with the exchange, and the sum of the losses in one pass."""
    (wait, a), (reduce, b), (once, _) = (hooked(mesh, TopK(0.1)) for _ in range(3))
    for step in range(3):
        for model, delay in (
            (wait, wait.set_requires_gradient_sync),
            (reduce, reduce.set_requires_all_reduce),
        ):
            model.zero_grad()
            delay(False)
            loss(model, 2 * step, rank).backward()
            delay(True)
            loss(model, 2 * step + 1, rank).backward()
        once.zero_grad()
        (loss(once, 2 * step, rank) + loss(once, 2 * step + 1, rank)).backward()
        for n, g in grads(once).items():
            torch.testing.assert_close(grads(wait)[n], g)
            torch.testing.assert_close(grads(reduce)[n], g)
    assert (
        a.meter.messages == b.meter.messages == 3 * 4 * 2
    )  # steps, modules; flags beside values and indices


def bad_steps_leave_no_trace(mesh: DeviceMesh, rank: int) -> None:
    """One row of one shard of one module is infinite on one rank: nobody keeps anything, everybody knows."""
    for name in ("topk", "signum", "int8"):
        model, hook = hooked(mesh, METHODS[name])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, bad in enumerate([True, False, True, False]):  # also before anything is kept
            before, start = kept(hook), weights(model)
            scaler.scale(loss(model, step, rank, spoil=math.inf if bad and rank == 3 else 1.0)).backward()
            found = grads(model)
            poisoned = bad and mesh["shard"].get_local_rank() == 0
            assert bool(found["first.weight"].isnan().all()) == poisoned, (name, step)
            assert found["b1.1.weight"].isfinite().all()
            assert alike(kept(hook), before) == bad, (name, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
            assert bool(norm.isfinite()) == (not bad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(weights(model), start) == bad
        assert scaler.get_scale() == 1.0
        assert same_everywhere(weights(model))
        assert {group["state"]["steps"] for group in hook.state_dict()["groups"].values()} == {4}


def bad_shards_become_zero(mesh: DeviceMesh, rank: int) -> None:
    model, hook = hooked(mesh, TopK(0.1), nonfinite="zero")
    loss(model, 0, rank).backward()
    before = kept(hook)
    model.zero_grad()
    loss(model, 1, rank, spoil=math.inf if rank == 3 else 1.0).backward()
    first = mesh["shard"].get_local_rank() == 0
    assert bool((grads(model)["first.weight"] == 0).all()) == first
    assert torch.equal(before["first"]["memory"], kept(hook)["first"]["memory"]) == first
    assert not torch.equal(before["b1.0"]["memory"], kept(hook)["b1.0"]["memory"])


def sixteen_bits(mesh: DeviceMesh, rank: int) -> None:
    """Reduced in bf16: the memory is in fp32 all the same."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = sharded(mesh["shard"], mp_policy=policy)
    hook = compress_sharded(model, TopK(0.1), mesh["replicate"].get_group())
    train(model, momentum(model), range(2), rank)
    assert kept(hook)["first"]["memory"].dtype == torch.float32
    assert hook.meter.gradient_bytes == 2 * 2 * (6 * 7 + 7 * 12 + 7 + 7 + 3 * 14 + 2 * 6)
    assert same_everywhere(weights(model))


def one_module(mesh: DeviceMesh, rank: int) -> None:
    """Only the outermost: its exchange begins when the backward pass is over."""
    net = Net()
    fully_shard(net, mesh=mesh["shard"])
    hook = compress_sharded(net, None, mesh["replicate"].get_group())
    assert hook.method == BFloat16()
    loss(net, 0, rank, spoil=math.inf if rank == 3 else 1.0).backward()
    assert bool(grads(net)["head.weight"].isnan().all()) == (mesh["shard"].get_local_rank() == 0)
    assert list(hook.state_dict()["groups"]) == ["(root)"]


def refusals(mesh: DeviceMesh, rank: int) -> None:
    replicas = mesh["replicate"].get_group()

    def refused(
        words: str, model: nn.Module, method: Any = None, group: Any = replicas, **options: Any
    ) -> None:
        hooks = hooks_of(model)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            compress_sharded(model, method, group, **options)
        assert hooks_of(model) == hooks  # nothing was changed

    refused("a Net is not sharded; apply fully_shard", Net())
    refused(r"Replicate\(\), Shard\(dim=0\).*give fully_shard the 1-D mesh\[\"shard\"\] only", sharded(mesh))
    model = sharded(mesh["shard"])
    refused(r"replicas=None is no process group; give replicas=mesh\[", model, group=None)
    refused(r"holds another shard of this replica", model, group=dist.group.WORLD)
    refused(r"holds another shard of this replica", model, group=mesh["shard"].get_group())
    for method in (
        PowerSGD(),
        AlternatingPowerSGD(),
        Atomo(),
        OneBitSGD(),
        Accordion(TopK(), TopK(0.1), every=2),
    ):
        refused(f"{type(method).__name__} works on matrices", model, {"first": TopK(), "*": method})
    refused("pattern 'first.weight' matches no module", model, {"first.weight": TopK()})
    refused("QSGD goes without a memory", model, QSGD(), memory=True)
    refused("TopK does not go by all_to_all", model, TopK(), exchange="all_to_all")
    refused('neither "nan" nor "zero"', model, nonfinite="inf")
    refused("differ from rank 0 in", model, TopK(0.2 if rank == 2 else 0.1))
    refused("differ from rank 0 in", model, TopK(0.2 if rank % 2 else 0.1))
    for method in (DGC(), Signum()):
        refused("first: .* and so has the SGD", model, {"first": method}, optimizer=momentum(model))
    uneven = Net()
    if mesh["replicate"].get_local_rank():
        uneven.first = nn.Linear(6, 13)
    refused("differ from rank 0 in", sharded(mesh["shard"], uneven))
    hook = compress_sharded(model, {"first": DGC()}, replicas, optimizer=torch.optim.SGD(model.parameters()))
    assert hook.method == {"first": DGC()}
    refused("compressed already; change its method by use", model)
    other = sharded(mesh["shard"])
    other.b0.set_all_reduce_hook(lambda flat: None)
    refused("b0 has an all-reduce hook already", other)


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        m._get_fsdp_state()._fsdp_param_group._all_reduce_hook
        for m in model.modules()
        if isinstance(m, FSDPModule)
    ]


def cases(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in METHODS:
        gradients_are_the_aggregators(mesh, rank, name)
    gradients_are_the_aggregators(mesh, rank, "topk", memory=False)
    no_compression_is_plain_averaging(mesh, rank)
    shards_draw_their_own_numbers(mesh, rank)
    several_passes(mesh, rank)
    bad_steps_leave_no_trace(mesh, rank)
    bad_shards_become_zero(mesh, rank)
    sixteen_bits(mesh, rank)
    one_module(mesh, rank)
    refusals(mesh, rank)
    state_cases(mesh, rank, folder)


def alone(rank: int, size: int, device: str) -> None:
    """One replica of one shard, reduced in bf16, which FSDP lets go of early: the gradients of a plain model."""
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("replicate", "shard"))
    plain = Net().to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = sharded(mesh["shard"], Net().to(device), mp_policy=policy)
    method = {"b0": TopK(0.5), "*": TopK(1.0)}
    hook = compress_sharded(model, method, mesh["replicate"].get_group())
    for step in range(4):
        before = kept(hook)
        for net in (model, plain):
            net.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device)
            net(x, spoil=math.inf if step == 2 and net is model else 1.0).square().mean().backward()
        assert alike(kept(hook), before) == (step == 2)
        for n, p in plain.named_parameters():
            if p.grad is not None and not n.startswith(("b0", "first") if step == 2 else "b0"):
                torch.testing.assert_close(grads(model)[n], p.grad, rtol=1e-2, atol=1e-3)
    assert hook.meter.seconds["encode"] > 0


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_on_a_gpu(tmp_path: Path) -> None:
    in_processes(alone, 1, "cuda", backend="nccl")


@pytest.mark.timeout(180)  # the hang guard
def test_in_real_processes(tmp_path: Path) -> None:
    in_processes(cases, 4, tmp_path)
