"""Cases of the FSDP2 hook's state: through files, other methods, other models and the switch."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import (
    MATRIX_METHODS,
    METHODS,
    Net,
    equal,
    hooked,
    loss,
    sharded,
    tensors,
    train,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import momentum

from processes import same_everywhere
from pufferfish.compression import BFloat16, EFSignSGD, NoCompression, Settings, TopK
from pufferfish.compression.fsdp2_hook import FSDP2Hook, compress_fsdp2


def trained(mesh: DeviceMesh, rank: int) -> tuple[Net, FSDP2Hook]:
    """A model with error feedback from two updates."""
    model, hook = hooked(mesh, TopK(0.1))
    train(model, momentum(model), range(2), rank)
    return model, hook


def resumes(mesh: DeviceMesh, rank: int, name: str, build: type[Net] = Net, **options: Any) -> None:
    ends = []
    saved: Any = None
    for resumed in (False, True):
        model, hook = hooked(mesh, (METHODS | MATRIX_METHODS)[name], build(), **options)
        optimizer = momentum(model)
        if resumed:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
            assert equal(tensors(hook), saved[3])
        else:
            train(model, optimizer, range(2), rank)
            state = {n: x.to_local().clone() for n, x in model.state_dict().items()}
            whole = {n: type(x).from_local(state[n], x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
                     for n, x in model.state_dict().items()}  # fmt: skip
            saved = whole, copy.deepcopy(optimizer.state_dict()), hook.state_dict(), tensors(hook)
        train(model, optimizer, range(2, 4), rank)
        assert same_everywhere(weights(model))
        ends.append(weights(model))
    assert torch.equal(*ends), name


def another_layout_starts_with_empty_state(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model, hook = trained(mesh, rank)
    state = hook.state_dict()
    state["modules"]["first"]["layout"] = "of other parameters"
    with pytest.warns(UserWarning, match=r"first starts with empty error feedback: .* of other parameters"):
        hook.load_state_dict(state)
    assert tensors(hook)["first"] == {}
    assert "error" in tensors(hook)["b0"]
    assert {module["state"]["steps"] for module in hook.state_dict()["modules"].values()} == {2}
    with pytest.warns(UserWarning, match="starts with empty error feedback"):
        hook.load_state_dict(state | {"shards": 4})
    assert not any(tensors(hook).values())
    train(model, momentum(model), range(2, 3), rank)
    with pytest.raises(ValueError, match="lacks modules, shards"):
        hook.load_state_dict({"shard": 0})
    others = {f"other.{name}": module for name, module in state["modules"].items()}
    before = tensors(hook)
    with pytest.raises(ValueError, match=r"belongs to another model, with other\..*; this model has .*first"):
        hook.load_state_dict(state | {"modules": others})
    assert tensors(hook).keys() == before.keys()


def error_feedback_follows_the_units(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Learning rate ÷ 10 and loss scale × 4: × 40; under Adam, and where rates differ, × 4."""
    for kind, split, factor in (
        (torch.optim.SGD, 0, 40.0),
        (torch.optim.Adam, 0, 4.0),
        (torch.optim.SGD, 1, 4.0),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        model = sharded(mesh["shard"])
        params = list(model.parameters())  # `first.weight` comes first
        groups = [{"params": params[:split], "lr": 1.0}] if split else []
        optimizer = kind([*groups, {"params": params[split:], "lr": 0.1}])
        group = mesh["replicate"].get_group()
        hook = compress_fsdp2(
            model, lambda scaler=scaler: Settings(TopK(0.1), scaler=scaler), group, optimizer=optimizer
        )
        scaler.scale(loss(model, 0, rank)).backward()
        before = tensors(hook)["first"]["error"]
        optimizer.param_groups[-1]["lr"] = 0.01
        scaler.update(4.0)
        (0 * loss(model, 0, rank)).backward()  # zeros: error feedback waits
        torch.testing.assert_close(tensors(hook)["first"]["error"], before * factor)


def methods_are_changed_on_all_workers(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model, hook = hooked(mesh, TopK(0.1))
    optimizer = momentum(model)
    train(model, optimizer, range(2), rank)
    before = tensors(hook)
    hook.use(EFSignSGD())
    assert equal(tensors(hook), before)  # error feedback is kept
    train(model, optimizer, range(2, 3), rank)
    hook.use({"*": NoCompression()})
    train(model, optimizer, range(3, 4), rank)
    assert not any(tensors(hook).values())  # it was sent
    assert same_everywhere(weights(model))
    wrong: list[tuple[Any, str]] = [
        (TopK(0.2 if rank == 3 else 0.1), "differ from rank 0"),
        ({"*": TopK()} if rank else {"first.weight": TopK()}, "matches no module|differ from rank 0"),
    ]
    for method, words in wrong:
        with pytest.raises((ValueError, RuntimeError), match=words):
            hook.use(method)
        assert hook.method == {"*": NoCompression()}
    train(model, optimizer, range(4, 5), rank)


def another_model(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """After a rebuild: state stays with unchanged modules."""
    model, hook = trained(mesh, rank)
    before, reference = tensors(hook), weakref.ref(model)
    hook.attach(model)  # which changes nothing
    assert equal(tensors(hook), before)
    net = Net()
    net.b0 = nn.Sequential(nn.Linear(11, 2, bias=False), nn.Linear(2, 13))
    new = sharded(mesh["shard"], net)
    hook.attach(new)
    assert equal(tensors(hook), before | {"b0": {}})
    del model
    gc.collect()
    assert reference() is None
    train(new, momentum(new), range(2, 4), rank)
    assert same_everywhere(weights(new))
    new.first.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"first: a shard of 36 gradients, after one of 42: .* attach\(model\)"
    ):
        loss(new, 4, rank).backward()
    with pytest.raises(ValueError, match="sharded over other workers"):
        hook.attach(sharded(init_device_mesh("cpu", (4,))))


def frozen_parameters(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model, hook = trained(mesh, rank)
    before = tensors(hook)
    model.first.bias.requires_grad_(False)
    hook.attach(model)
    assert equal(tensors(hook), before | {"first": {}})
    train(model, momentum(model), range(2, 4), rank)
    assert same_everywhere(weights(model))


def unused_parameters(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Methods without state accept shards of changing sizes; for the others torch has a setting."""
    model, _ = hooked(mesh, BFloat16())
    for step in range(3):
        loss(model, step, rank, maybe=step == 1).backward()
        assert (model.maybe.weight.grad is None) == (step == 0)
    model, hook = hooked(mesh, TopK(0.1))
    if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.12 or 2.13 on
        model.set_reduce_scatter_unused_params(True)
        for step in range(3):
            loss(model, step, rank, maybe=step == 1).backward()
        assert tensors(hook)["(root)"]["error"].numel() == 12 + 18


CASES = (
    another_layout_starts_with_empty_state,
    error_feedback_follows_the_units,
    methods_are_changed_on_all_workers,
    frozen_parameters,
    unused_parameters,
    another_model,
)
