"""Methods for matrices between FSDP2 replicas, in four real processes on gloo: two replicas of two shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_state
import torch
import torch.distributed as dist
from sharding import (
    MATRIX_METHODS,
    MatrixNet,
    Net,
    gradients_are_those_of_simulated_workers,
    grads,
    hooked,
    loss,
    sharded,
    train,
    weights,
)
from test_fsdp2_hook import on_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from training import momentum

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import (
    DGC,
    NoCompression,
    PowerSGD,
    Settings,
    Simulated,
    TopK,
)
from pufferfish.compression.fsdp2_hook import FSDP2Hook
from pufferfish.layers.names import own_name


def matrices(mesh: DeviceMesh, method: Any, **options: Any) -> tuple[Net, FSDP2Hook]:
    return hooked(mesh, method, MatrixNet(), **({"smallest": 0} | options))


def kept(hook: FSDP2Hook, key: str = "error") -> dict[str, Tensor]:
    """State under one key, by name of the tensors."""
    states = [module["state"] for module in hook.state_dict()["modules"].values()]
    parts = [state[part] for state in states for part in ("shared", "own")]
    return {name: x[key] for part in parts for name, x in part.items() if key in x}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def small_matrices_are_sent_uncompressed(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Elements of a shard count: 6×11, 6×6 and 3×21 here, less there."""
    gradients_are_those_of_simulated_workers(mesh, rank, "powersgd", smallest=60)
    model, hook = matrices(mesh, PowerSGD(1), smallest=60)
    train(model, momentum(model), range(1), rank)
    shard = mesh["shard"].get_local_rank()
    names = ["b0.0.weight", "b1.1.weight"] if shard == 0 else ["b0.0.weight"]
    assert sorted(kept(hook)) == [f"{name}[{shard}/2]" for name in names]
    with pytest.warns(UserWarning, match=r"PowerSGD\(rank=9, .*\) compresses nothing here"):
        hook.use({"b0": PowerSGD(1), "*": PowerSGD(9)})


def columns(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Sharded over the second dimension: a worker's part has all rows and some columns."""
    nets = []
    for _ in range(2):
        net = MatrixNet()
        fully_shard(
            net, mesh=mesh["shard"], shard_placement_fn=lambda p: Shard(1) if p.shape == (11, 6) else None
        )
        nets.append(net)
    pf.compress(nets[0], PowerSGD(1), replicas=mesh["replicate"].get_group(), settings=Settings(smallest=0))
    assert nets[0].first.weight.to_local().shape == (11, 3)
    simulated = Simulated(Settings(PowerSGD(1), smallest=0), 2)
    key = f"first.weight[{mesh['shard'].get_local_rank()}/2]"
    for step in range(3):
        for net in nets:
            net.zero_grad()
            loss(net, step, rank).backward()
        everyone = [torch.empty(11, 3) for _ in range(2)]
        dist.all_gather(everyone, grads(nets[1])["first.weight"], group=mesh["replicate"].get_group())
        mean = simulated.average([{key: x} for x in everyone])[0][key]
        assert torch.equal(grads(nets[0])["first.weight"], mean)


def bytes_are_those_of_each_shard(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """r (m + n) for m rows of each matrix, vectors uncompressed, and a flag for each tensor and each module."""
    model, hook = matrices(mesh, PowerSGD(1))
    train(model, momentum(model), range(3), rank)
    if mesh["shard"].get_local_rank() == 0:
        first, b0, b1 = (6 + 6) + 6, (6 + 11) + 6 + (4 + 6) + 4, 11 + 11 + (3 + 21) + 3
        head, flags = 5 + 1, 3 + 5 + 5 + 3
        elements = 36 + 6 + 66 + 6 + 24 + 4 + 11 + 11 + 63 + 3 + 5 + 1
    else:
        first, b0, b1 = (5 + 6) + 5, (6 + 11) + 6 + (3 + 6) + 3, 10 + 10 + (2 + 21) + 2
        head, flags = 1, 3 + 5 + 5 + 2  # one zero of the head's padding
        elements = 30 + 5 + 66 + 6 + 18 + 3 + 10 + 10 + 42 + 2 + 1
    meter, a_step = hook.meter, 4 * (first + b0 + b1 + head + flags)
    assert meter.collective_bytes == {**dict.fromkeys(meter.collective_bytes, 0), "all_reduce": 3 * a_step}
    assert meter.gradient_bytes == 3 * 4 * elements
    assert meter.steps == 3
    assert meter.wire_bytes / meter.steps == a_step  # of two replicas, each sends as much as it gives
    assert meter.plain_wire_bytes / meter.steps == 4 * elements


def other_precisions(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Reduced in bf16: error feedback and factors are in fp32. Offloaded to the CPU: bit-identical."""
    ends = []
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {},
    ):
        model = sharded(mesh["shard"], MatrixNet(), **options)
        hook = pf.compress(
            model, PowerSGD(1), replicas=mesh["replicate"].get_group(), settings=Settings(smallest=0)
        )
        train(model, momentum(model), range(3), rank)
        assert {x.dtype for key in ("error", "Q") for x in kept(hook, key).values()} == {torch.float32}
        assert same_everywhere(weights(model))
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=0.02)
    assert torch.equal(ends[1], ends[2])


def unused_parameters(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """`maybe` is not used, and nobody can tell whose gradients are missing."""
    model, _ = hooked(mesh, PowerSGD(1), smallest=0)
    with pytest.raises(
        ValueError, match=r"\(root\): a shard of 12 gradients, instead of 30: .*_unused_params"
    ):
        loss(model, 0, rank).backward()
    model, _ = hooked(mesh, PowerSGD(1), smallest=0)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.12 or 2.13 on
        model.set_reduce_scatter_unused_params(True)
        train(model, momentum(model), range(2), rank)
        assert same_everywhere(weights(model))


def resumes(mesh: DeviceMesh, rank: int, names: tuple[str, ...]) -> None:
    for name in names:
        sharded_state.resumes(mesh, rank, name, MatrixNet, smallest=0)


def resumes_from_a_checkpoint(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    ends = []
    for stop, name in ((4, "straight"), (2, "stopped"), (4, "stopped")):
        model, hook = matrices(mesh, {"b?": PowerSGD(1), "*": TopK(0.1)})
        optimizer = momentum(model)
        with pf.Checkpoint(folder / name, model, optimizer, compressor=hook, every=1) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, stop):
                train(model, optimizer, range(step, step + 1), rank)
                checkpoint.step(step=step + 1)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[2])


def state_of_other_workers(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """Of other replicas Q is kept, of other shards nothing, and of that all replicas have the same."""
    model, hook = matrices(mesh, PowerSGD(1))
    train(model, momentum(model), range(2), rank)
    factors, state = kept(hook, "Q"), hook.state_dict()
    for module in state["modules"].values():
        module["state"]["size"] = 3
    with pytest.warns(UserWarning, match="starts with empty error feedback"):
        hook.load_state_dict(state)
    assert not kept(hook)
    assert same(kept(hook, "Q"), factors)
    train(model, momentum(model), range(2, 3), rank)
    assert same_everywhere(weights(model))
    state = hook.state_dict() | ({"shard": 1} if rank == 2 else {})  # which is shard 0 now
    if rank % 2 == 0:
        with pytest.warns(UserWarning, match="starts with empty error feedback"):
            hook.load_state_dict(state)
        assert not kept(hook, "Q")
    else:
        hook.load_state_dict(state)
        assert kept(hook, "Q")
    train(model, momentum(model), range(3, 5), rank)
    assert same_everywhere(weights(model))
    state = hook.state_dict()
    hook.use(TopK(0.1))
    with pytest.warns(UserWarning, match="of a method for matrices while this one is not"):
        hook.load_state_dict(state)
    train(model, momentum(model), range(5, 6), rank)
    assert same_everywhere(weights(model))


def error_feedback_goes_along_to_other_methods(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """From one vector to rows and back, bit for bit, also what DGC has not sent; rescaled as before."""
    for method in (TopK(0.1), DGC(0.9)):
        model = sharded(mesh["shard"], MatrixNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replicas = mesh["replicate"].get_group()
        hook = pf.compress(model, method, replicas=replicas, optimizer=optimizer)
        train(model, optimizer, range(2), rank)
        key = "error" if method == TopK(0.1) else "v"
        before = kept(hook, key)
        hook.use(PowerSGD(1))
        rows = kept(hook)
        shard = mesh["shard"].get_local_rank()
        first = before[f"first[{shard}/2]"]
        n = 36 if shard == 0 else 30
        assert torch.equal(rows[f"first.weight[{shard}/2]"].flatten(), first[:n])
        assert torch.equal(rows[f"first.bias[{shard}/2]"], first[36 : 36 + n // 6])
        assert {module["state"]["steps"] for module in hook.state_dict()["modules"].values()} == {2}
        hook.use(TopK(0.1))
        assert same(kept(hook), before)
        hook.use(PowerSGD(1))
        optimizer.param_groups[0]["lr"] = 0.01
        (0 * loss(model, 0, rank)).backward()  # zeros: error feedback waits
        for name, x in kept(hook).items():
            torch.testing.assert_close(x, rows[name] * 10)
        optimizer.zero_grad()
        hook.use(NoCompression())
        train(model, optimizer, range(2, 3), rank)
        assert not kept(hook)  # it was sent
        assert same_everywhere(weights(model))


def each_parameter_has_its_units(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    model = sharded(mesh["shard"], MatrixNet())
    named = {own_name(n): p for n, p in model.named_parameters()}
    conv = named.pop("b0.2.weight")
    optimizer = torch.optim.SGD([{"params": [conv], "lr": 1.0}, {"params": [*named.values()], "lr": 0.1}])
    replicas = mesh["replicate"].get_group()
    hook = pf.compress(
        model, PowerSGD(1), replicas=replicas, optimizer=optimizer, settings=Settings(smallest=0)
    )
    loss(model, 0, rank).backward()
    before = kept(hook)
    optimizer.param_groups[0]["lr"] = 0.5
    (0 * loss(model, 0, rank)).backward()
    for name, x in kept(hook).items():
        torch.testing.assert_close(x, before[name] * (2 if name.startswith("b0.2") else 1))


def through_the_switch(mesh: DeviceMesh, rank: int, folder: Path) -> None:
    """State stays with unchanged modules, and the factors of the others are compressed by rows."""
    model: nn.Module
    model, hook = matrices(mesh, PowerSGD(1))
    optimizer, switch = momentum(model), pf.Switch(rank=2, when=pf.AtStep(2), keep=["first"])
    for step in range(4):
        before = kept(hook)
        model, optimizer = switch.rebuild(
            model, optimizer, build=MatrixNet, shard=lambda net: sharded(mesh["shard"], net), step=step
        )
        if step == 2:
            assert any(isinstance(m, pf.layers.LowRank) for m in model.modules())
            assert same(kept(hook), {n: x for n, x in before.items() if n.startswith("first")})
        train(model, optimizer, range(step, step + 1), rank)
    assert any(".down." in name or ".up." in name for name in kept(hook))
    assert same_everywhere(weights(model))


def every_method(mesh: DeviceMesh, rank: int) -> None:
    for name in MATRIX_METHODS:
        gradients_are_those_of_simulated_workers(mesh, rank, name)


@pytest.mark.timeout(180)  # against deadlocks
def test_every_method_for_matrices() -> None:
    in_processes(on_mesh, 4, every_method)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "names",
    [
        ("powersgd", "sparseloco"),
        pytest.param(
            tuple(MATRIX_METHODS.keys() - {"powersgd", "sparseloco"}), marks=pytest.mark.slow, id="others"
        ),
    ],
    ids=", ".join,
)
def test_resumes(names: tuple[str, ...]) -> None:
    in_processes(on_mesh, 4, resumes, names)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "cases",
    [
        (small_matrices_are_sent_uncompressed, columns),
        (bytes_are_those_of_each_shard, other_precisions, unused_parameters),
        (state_of_other_workers, error_feedback_goes_along_to_other_methods, each_parameter_has_its_units),
        (resumes_from_a_checkpoint, through_the_switch),
    ],
    ids=lambda cases: ", ".join(case.__name__ for case in cases),
)
def test_rows_of_two_replicas(cases: tuple[Callable[..., None], ...], tmp_path: Path) -> None:
    in_processes(on_mesh, 4, all_of, cases, tmp_path)


def all_of(mesh: DeviceMesh, rank: int, cases: tuple[Callable[..., None], ...], folder: Path) -> None:
    for case in cases:
        case(mesh, rank, folder)
