"""The switch under FSDP2, in real processes on gloo."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import (
    Make,
    SelfAttention,
    Text,
    adagrad,
    adamw,
    image_net,
    mixture,
    momentum,
    rmsprop,
    same_as,
    sharder,
    states,
    switched,
    update,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from live import Live
from processes import in_processes
from pufferfish.distributed.workers import Workers
from pufferfish.layers.names import local_part
from pufferfish.lowrank.factors import shared_spectra
from pufferfish.lowrank.rewrite import whole
from pufferfish.switching.fsdp2 import ShardedJob, outline, parameters, rebuild


def check_like_ddp(
    build: Callable[[], nn.Module],
    make: Make,
    mesh: DeviceMesh,
    shard: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> None:
    """Warm-up, switch and low-rank training, beside the same with DDP."""
    shard = shard or sharder(mesh)
    text = build is Text
    model, plain = (build().to(mesh.device_type) for _ in range(2))
    shard(model)
    optimizer, other = make(model), make(plain)
    ddp = DDP(plain, broadcast_buffers=False)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
    options = {"rank": 0.25, "when": pf.AtStep(2)} | options
    switch, beside = pf.Switch(**options), pf.Switch(**options)
    for step in range(5):
        before = model
        if step == 2:  # sums over more than two workers depend on their order: go on from the same numbers
            same_as(model, plain, 1e-5)
            with torch.no_grad():
                for p, q in zip(parameters(model).values(), plain.parameters(), strict=True):
                    q.copy_(whole(p))
            other.load_state_dict(
                {
                    "state": dict(enumerate(states(optimizer))),
                    "param_groups": other.state_dict()["param_groups"],
                }
            )
        model, same = switch.rebuild(model, optimizer, build=build, shard=shard, step=step)
        assert same is optimizer
        assert (model is not before) == (step == 2) == beside.step(ddp, other, step=step)
        if step == 2:
            same_as(model, plain)  # to the bit
            for mine, theirs in zip(states(optimizer), states(other), strict=True):
                assert mine.keys() == theirs.keys()
                for key, value in mine.items():
                    torch.testing.assert_close(value, theirs[key], rtol=1e-6, atol=0)
            assert switch.report is not None
            assert beside.report is not None
            assert [e.error for e in switch.report.plan] == [e.error for e in beside.report.plan]
            for mine, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
                assert {k: v for k, v in mine.items() if k != "params"} == {
                    k: v for k, v in theirs.items() if k != "params"
                }
            assert any(isinstance(m, pf.layers.LowRank) for m in model.modules())
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert bool(switch.report.plan.shared_inputs) == (build is SelfAttention)
        losses = [update(m, o, step, text) for m, o in ((model, optimizer), (ddp, other))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    same_as(model, plain, 1e-5)
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)


def what_stays_is_moved(mesh: DeviceMesh) -> None:
    """Same parameters with their state, ties, flags, modes and buffers; and nothing is left behind."""
    model, optimizer, rebuild = switched(mesh, Text)
    model.layer.eval()
    embedding, state, places = model.embed.weight, optimizer.state[model.embed.weight], model.places
    gone = [local_part(p.detach()) for p in (model.layer.linear1.weight, model.layer.self_attn.in_proj_bias)]
    old_scale = model.scale
    with torch.no_grad():
        model(torch.zeros(1, 7, dtype=torch.long))  # leaves the root's parameters whole
    new, done = rebuild()
    assert new.embed.weight is new.head.weight is embedding
    assert optimizer.state[embedding] is state
    assert new.places is places
    assert new.scale is old_scale
    assert not new.layer.linear1.up.bias.requires_grad
    assert (new.training, new.layer.training) == (True, False)
    assert isinstance(new.layer.self_attn, pf.layers.LowRankMultiheadAttention)
    assert done["layer.linear1"].error > 0
    assert [x.untyped_storage().nbytes() for x in gone] == [0, 0]
    assert list(model.parameters()) == list(model.buffers()) == []
    with pytest.raises(RuntimeError, match=r"use the model that switch\.rebuild returned"):
        model(torch.zeros(1, 7, dtype=torch.long))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in new.parameters()}
    assert {id(p) for p in optimizer.state} <= held
    update(new, optimizer, 1, text=True)


def wrappers_are_looked_through(mesh: DeviceMesh) -> None:
    """What `shard` does besides: activation checkpointing, compiling."""

    def shard(model: nn.Module) -> nn.Module:
        model[6] = checkpoint_wrapper(model[6])
        sharder(mesh)(model)
        return torch.compile(model, backend="aot_eager")

    model = shard(image_net())
    optimizer, switch = adamw(model), pf.Switch(rank=0.25, when=pf.AtStep(1))
    for step in range(3):
        model, _ = switch.rebuild(model, optimizer, build=image_net, shard=shard, step=step)
        update(model, optimizer, step)
    assert switch.report is not None
    assert switch.report.plan.ranks.keys() == {"3", "6"}
    assert "6.up.weight" in optimizer.param_groups[0]["param_names"]


def spectra_are_those_of_the_whole_weights(mesh: DeviceMesh) -> None:
    for build in (image_net, Text):
        model, _, _ = switched(mesh, build, warm_up=0)
        found, expected = shared_spectra(ShardedJob(model, build)), pf.planning.spectra(build())
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert torch.equal(values, expected[name]), name


def smaller() -> nn.Module:
    model = image_net()
    model[6] = nn.Linear(48 * 9, 64)
    return model


def errors_leave_the_model_as_it_was(mesh: DeviceMesh) -> None:
    model, optimizer, rebuild = switched(mesh, image_net)
    before = {name: whole(p).clone() for name, p in parameters(model).items()}
    text, kept = outline(Text(), Text), copy.deepcopy(optimizer.state_dict()["param_groups"])

    def sideways(m: nn.Module) -> None:
        fully_shard(m, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.shape == (65, 16) else None)
        fully_shard(nn.Linear(2, 2), mesh=mesh)

    def narrow(m: nn.Module) -> None:
        fully_shard(m, mesh=mesh, ignored_params={m[8].weight})

    def bigger(m: nn.Module) -> None:
        m.extra = nn.Linear(2, 2, device="meta")
        sharder(mesh)(m)

    for given, message in (
        ({"build": smaller}, r"build\(\) returns 6\.weight as torch\.float32 64×432, but in the .* 65×432"),
        ({"build": lambda: image_net().half()}, r"build\(\) returns 0\.weight as torch\.float16"),
        ({"build": Text}, r"build\(\) returns a different model: parameter 0\.bias is not in it"),
        ({"build": lambda: model}, r"build\(\) returned 0\.weight on cpu; it must build a new model"),
        ({"build": lambda: image_net().to("cpu")}, r"build\(\) cannot run on the meta device"),
        ({"shard": lambda m: None}, r"switch\.rebuild needs a model sharded by fully_shard"),
        ({"shard": narrow}, r"8\.weight: shard\(\) makes it not sharded"),
        ({"shard": bigger}, r"shard\(\) added the parameter extra\.bias"),
        ({"plan": pf.plan(text, 0.25)}, "the plan has this layer, but the model does not"),
        ({"plan": pf.plan(image_net(), pf.Energy(0.9))}, "the plan has a rule instead of a rank"),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS does not support"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            rebuild(**given)
    weight = local_part(model[6].weight.detach())
    if mesh.get_rank() == mesh.size() - 1:
        weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"6\.weight: the weight contains inf or NaN; nothing was changed"):
        rebuild()
    if mesh.get_rank() == mesh.size() - 1:
        weight.copy_(before["6.weight"].chunk(mesh.size())[-1])
    with pytest.raises(ValueError, match=r"rank 1: build\(\) returns 6\.weight"):
        rebuild(build=smaller if mesh.get_rank() else image_net)
    for name, p in parameters(model).items():
        assert torch.equal(whole(p), before[name]), name
    assert optimizer.state_dict()["param_groups"] == kept
    new, _ = rebuild(shard=sideways)  # and now it works; a factor may be sharded otherwise
    if 16 % mesh.size() == 0:
        assert new[6].up.weight.placements == (Shard(1),)
    update(new, optimizer, 1)


def memory(mesh: DeviceMesh, m: int, n: int) -> float:
    """How many whole layers a rebuild holds at most beyond the shards that were there."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(n, m, bias=False) for _ in range(2 * mesh.size())))

    def shard(model: nn.Module) -> None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model = build()
    shard(model)
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    plan = pf.plan(build(), 0.25)
    there = [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]
    live = Live(there)
    del there, p
    with live:
        rebuild(
            model, optimizer, plan, build=build, shard=shard, carry=True,
            workers=Workers(dist.group.WORLD, torch.device("cpu")),
        )  # fmt: skip
    assert live.now() < 0.7 * live.start  # low-rank shards, and none of the dense ones
    return (live.peak - live.start) / (4 * m * n)


def memory_is_bounded(mesh: DeviceMesh) -> None:
    """Shards and two whole layers. Of square ones the SVD wants more: its fp64 matrices count as two each."""
    assert memory(mesh, 512, 2048) <= 2.01
    assert memory(mesh, 1024, 1024) <= 3.6


def on_mesh(case: Callable[..., None], *args: Any, **options: Any) -> Callable[[int, int], None]:
    """A case that is called with a mesh of all workers behind its arguments."""
    return functools.partial(_call_on_mesh, functools.partial(case, *args), options)


def _call_on_mesh(case: Callable[..., None], options: dict[str, Any], rank: int, size: int) -> None:
    case(init_device_mesh("cpu", (size,)), **options)


def copies_of_shards(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    check_like_ddp(image_net, adamw, mesh)


#: By test id.
CASES = {
    "image-momentum": on_mesh(check_like_ddp, image_net, momentum),
    "text-adamw": on_mesh(check_like_ddp, Text, adamw),
    "text-momentum-reset": on_mesh(check_like_ddp, Text, momentum, state="reset"),
    "unchanged": on_mesh(what_stays_is_moved),
    "spectra": on_mesh(spectra_are_those_of_the_whole_weights),
    "errors": on_mesh(errors_leave_the_model_as_it_was),
}
TWO = {
    "shared-inputs-momentum": on_mesh(check_like_ddp, SelfAttention, momentum, shard=fully_shard),
    "mixture-adamw": on_mesh(check_like_ddp, mixture, adamw),
    "image-rmsprop-automatic": on_mesh(check_like_ddp, image_net, rmsprop, rank=None),
    "image-adagrad-reset": on_mesh(check_like_ddp, image_net, adagrad, state="reset"),
    "wrappers": on_mesh(wrappers_are_looked_through),
    "memory": on_mesh(memory_is_bounded),
}
#: Cases in which 4 workers show more: sums of more than two terms, shards of unequal sizes.
FOUR = {"text-adamw", "spectra"}


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *(pytest.param(case, 2, id=f"{name}-2") for name, case in (CASES | TWO).items()),
        *(
            pytest.param(case, 4, id=f"{name}-4", marks=[] if name in FOUR else pytest.mark.slow)
            for name, case in CASES.items()
        ),
        pytest.param(copies_of_shards, 4, id="copies-4"),
    ],
)
def test_in_real_processes(case: Callable[[int, int], None], size: int) -> None:
    in_processes(case, size)


def cuda_cases(rank: int, size: int) -> None:
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (size,))
    check_like_ddp(Text, momentum, mesh)
    model = Text().cuda()
    shard = sharder(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shard(model)
    optimizer, switch = adamw(model), pf.Switch(rank=0.25, when=pf.AtStep(1))
    for step in range(3):
        model, _ = switch.rebuild(model, optimizer, build=Text, shard=shard, step=step)
        assert torch.tensor(update(model, optimizer, step, text=True)).isfinite()
    offloaded = Text().cuda()
    sharder(mesh, offload_policy=CPUOffloadPolicy())(offloaded)
    with pytest.raises(ValueError, match=r"embed\.weight: its shards are offloaded to the cpu"):
        rebuild(
            offloaded, None, pf.plan(Text(), 0.25), build=Text, shard=shard, carry=True,
            workers=Workers(dist.group.WORLD, torch.device("cuda", rank)),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_on_gpus() -> None:
    size = torch.cuda.device_count()
    in_processes(cuda_cases, size, backend="nccl")
