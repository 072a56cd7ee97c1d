"""Cases of the sharded hook: what it keeps, through files, other methods, other models and the switch."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import (
    METHODS,
    Net,
    alike,
    hooked,
    kept,
    loss,
    sharded,
    train,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import momentum

import pufferfish as pf
from processes import same_everywhere
from pufferfish.compression import BFloat16, EFSignSGD, NoCompression, PowerSGD, TopK
from pufferfish.compression.fsdp2_hook import compress_sharded


def resumes(mesh: DeviceMesh, rank: int, name: str) -> None:
    ends = []
    saved: Any = None
    for stopped in (False, True):
        model, hook = hooked(mesh, METHODS[name])
        optimizer = momentum(model)
        if stopped:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
            assert alike(kept(hook), saved[3])
        else:
            train(model, optimizer, range(2), rank)
            state = {n: x.to_local().clone() for n, x in model.state_dict().items()}
            whole = {n: type(x).from_local(state[n], x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
                     for n, x in model.state_dict().items()}  # fmt: skip
            saved = whole, copy.deepcopy(optimizer.state_dict()), hook.state_dict(), kept(hook)
        train(model, optimizer, range(2, 4), rank)
        assert same_everywhere(weights(model))
        ends.append(weights(model))
    assert torch.equal(*ends), name


def resumes_from_a_checkpoint(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    ends = []
    for stop, name in ((4, "straight"), (2, "stopped"), (4, "stopped")):
        model, hook = hooked(mesh, TopK(0.1))
        optimizer = momentum(model)
        with pf.Checkpoint(folder / name, model, optimizer, compressor=hook, every=1) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, stop):
                train(model, optimizer, range(step, step + 1), rank)
                checkpoint.step(step=step + 1)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[2])


def another_layout_starts_anew(mesh: DeviceMesh, rank: int) -> None:
    model, hook = hooked(mesh, TopK(0.1))
    train(model, momentum(model), range(2), rank)
    state = hook.state_dict()
    state["groups"]["first"]["layout"] = "of other parameters"
    with pytest.warns(UserWarning, match=r"first starts with empty memories: .* of other parameters"):
        hook.load_state_dict(state)
    assert kept(hook)["first"] == {}
    assert "memory" in kept(hook)["b0"]
    assert {group["state"]["steps"] for group in hook.state_dict()["groups"].values()} == {2}
    with pytest.warns(UserWarning, match="starts with empty memories"):
        hook.load_state_dict(state | {"shards": 4})
    assert not any(kept(hook).values())
    train(model, momentum(model), range(2, 3), rank)
    with pytest.raises(ValueError, match="lacks groups, shards"):
        hook.load_state_dict({"shard": 0})
    others = {f"other.{name}": group for name, group in state["groups"].items()}
    before = kept(hook)
    with pytest.raises(ValueError, match=r"of another model, with other\..*; here are .*first"):
        hook.load_state_dict(state | {"groups": others})
    assert kept(hook).keys() == before.keys()


def memory_follows_the_units(mesh: DeviceMesh, rank: int) -> None:
    """Rate ÷ 10 and loss scale × 4: the memory × 40; under Adam × 4; where rates differ, as it is."""
    for kind, split, factor in (
        (torch.optim.SGD, 0, 40.0),
        (torch.optim.Adam, 0, 4.0),
        (torch.optim.SGD, 1, 1.0),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        model = sharded(mesh["shard"])
        params = list(model.parameters())  # `first.weight` comes first
        groups = [{"params": params[:split], "lr": 1.0}] if split else []
        optimizer = kind([*groups, {"params": params[split:], "lr": 0.1}])
        group = mesh["replicate"].get_group()
        hook = compress_sharded(model, TopK(0.1), group, optimizer=optimizer, scaler=scaler)
        scaler.scale(loss(model, 0, rank)).backward()
        before = kept(hook)["first"]["memory"]
        optimizer.param_groups[-1]["lr"] = 0.01
        scaler.update(4.0)
        (0 * loss(model, 0, rank)).backward()  # zeros: the memory waits
        torch.testing.assert_close(kept(hook)["first"]["memory"], before * factor)


def methods_are_changed_together(mesh: DeviceMesh, rank: int) -> None:
    model, hook = hooked(mesh, TopK(0.1))
    optimizer = momentum(model)
    train(model, optimizer, range(2), rank)
    before = kept(hook)
    hook.use(EFSignSGD())
    assert alike(kept(hook), before)  # the memory goes on
    train(model, optimizer, range(2, 3), rank)
    hook.use({"*": NoCompression()})
    train(model, optimizer, range(3, 4), rank)
    assert not any(kept(hook).values())  # and was sent
    assert same_everywhere(weights(model))
    wrong: list[tuple[Any, str]] = [
        (TopK(0.2 if rank == 3 else 0.1), "differ from rank 0"),
        ({"*": TopK()} if rank else {"first.weight": TopK()}, "matches no module|differ from rank 0"),
        (PowerSGD(), "PowerSGD works on matrices"),
    ]
    for method, words in wrong:
        with pytest.raises((ValueError, RuntimeError), match=words):
            hook.use(method)
        assert hook.method == {"*": NoCompression()}
    train(model, optimizer, range(4, 5), rank)


def another_model(mesh: DeviceMesh, rank: int) -> None:
    """After a rebuild: memories stay with modules that stayed as they were."""
    model, hook = hooked(mesh, TopK(0.1))
    train(model, momentum(model), range(2), rank)
    before, held = kept(hook), weakref.ref(model)
    hook.attach(model)  # which changes nothing
    assert alike(kept(hook), before)
    net = Net()
    net.b0 = nn.Sequential(nn.Linear(11, 2, bias=False), nn.Linear(2, 13))
    new = sharded(mesh["shard"], net)
    hook.attach(new)
    assert alike(kept(hook), before | {"b0": {}})
    del model
    gc.collect()
    assert held() is None
    train(new, momentum(new), range(2, 4), rank)
    assert same_everywhere(weights(new))
    new.first.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"first: a shard of 36 gradients, where there were 42: .* attach\(model\)"
    ):
        loss(new, 4, rank).backward()
    with pytest.raises(ValueError, match="sharded over other ranks"):
        hook.attach(sharded(init_device_mesh("cpu", (4,))))


def through_the_switch(mesh: DeviceMesh, rank: int) -> None:
    """The hook goes over to the new model, which is what a native 2-D mesh would come to."""
    ends = []
    for native in (True, False):
        shape = mesh if native else mesh["shard"]
        model: nn.Module = sharded(shape)
        replicas = mesh["replicate"].get_group()
        hook = None if native else pf.compress(model, NoCompression(), replicas=replicas)
        optimizer, switch = momentum(model), pf.Switch(rank=2, when=pf.AtStep(2))
        for step in range(4):
            model, optimizer = switch.rebuild(
                model, optimizer, build=Net, shard=lambda net, shape=shape: sharded(shape, net), step=step
            )
            train(model, optimizer, range(step, step + 1), rank)
        assert any(isinstance(m, pf.layers.LowRank) for m in model.modules())
        assert hook is None or hook.meter.steps == 4 * 4  # one for each sharded module
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def frozen_parameters(mesh: DeviceMesh, rank: int) -> None:
    model, hook = hooked(mesh, TopK(0.1))
    train(model, momentum(model), range(2), rank)
    before = kept(hook)
    model.first.bias.requires_grad_(False)
    hook.attach(model)
    assert alike(kept(hook), before | {"first": {}})
    train(model, momentum(model), range(2, 4), rank)
    assert same_everywhere(weights(model))


def unused_parameters(mesh: DeviceMesh, rank: int) -> None:
    """Shards of changing sizes are nothing to a method that keeps nothing; for the others torch has a setting."""
    model, _ = hooked(mesh, BFloat16())
    for step in range(3):
        loss(model, step, rank, maybe=step == 1).backward()
        assert (model.maybe.weight.grad is None) == (step == 0)
    model, hook = hooked(mesh, TopK(0.1))
    if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.12 or 2.13 on
        model.set_reduce_scatter_unused_params(True)
        for step in range(3):
            loss(model, step, rank, maybe=step == 1).backward()
        assert kept(hook)["(root)"]["memory"].numel() == 12 + 18


def state_cases(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    for name in ("topk", "dgc", "int8", "qsgd", "several"):
        resumes(mesh, rank, name)
    resumes_from_a_checkpoint(mesh, rank, folder)
    another_layout_starts_anew(mesh, rank)
    memory_follows_the_units(mesh, rank)
    methods_are_changed_together(mesh, rank)
    frozen_parameters(mesh, rank)
    unused_parameters(mesh, rank)
    another_model(mesh, rank)
    through_the_switch(mesh, rank)
