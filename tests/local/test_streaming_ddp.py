"""Fragments and delayed averages in real processes on gloo, compared with a plain sequential implementation."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_workers import adamw, batch, build, close, diloco, floats, sgd, streaming, train, update
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from nested import equal
from processes import in_processes, same_everywhere
from pufferfish.compression import BlockInt8, PowerSGD, TopK
from pufferfish.local.fragments import split_by_depth
from pufferfish.local.local_steps import LocalSteps

NESTEROV = {"lr": 0.7, "momentum": 0.9}


def fragments_of(k: int) -> list[list[str]]:
    model = build()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    sizes |= {"1.running_mean": 40, "1.running_var": 40}
    return split_by_depth(sizes, k)


def equals_a_sequential_implementation(rank: int, size: int, folder: str) -> None:
    for k, delay, mixing, make, outer, settings in (
        (2, 0, 0.0, adamw, diloco, NESTEROV),
        (2, 1, 0.5, sgd, None, {}),
        (3, 3, 0.25, adamw, diloco, NESTEROV),  # more than one on the way
        (1, 4, 0.0, sgd, diloco, NESTEROV),
    ):
        model = build(seed=rank)  # start broadcasts rank 0's weights
        local = LocalSteps(5, outer=outer, fragments=k, delay=delay, mixing=mixing)
        optimizer = make(model.parameters())
        local.start(model)
        applied = train(local, model, optimizer, range(13), rank)
        offsets = [5 * p // k for p in range(k)]
        assert applied == [t for t in range(1, 14) if t > delay and (t - delay) % 5 in offsets]
        split = fragments_of(k)
        close(model, streaming(size, split, 5, delay, mixing, 13, make, **settings)[rank])
        assert local.sync(model)
        assert not local.sync(model)
        for name, x in model.state_dict().items():
            assert same_everywhere(x), name


def compression_equals_simulated_workers(rank: int, size: int, folder: str) -> None:
    """Methods with one message and with two, which depend on each other; error feedback belongs to the fragment."""
    for method in (TopK(0.05), BlockInt8(64), PowerSGD(2)):
        model = build()
        local = LocalSteps(4, outer=diloco, method=method, fragments=2, delay=3)
        local.start(model)
        train(local, model, sgd(model.parameters()), range(13), rank)
        reference = streaming(size, fragments_of(2), 4, 3, 0.5, 13, sgd, **NESTEROV, method=method)
        close(model, reference[rank])


def a_worker_does_not_wait_for_slower_ones(rank: int, size: int, folder: str) -> None:
    """Worker 0 sends and goes on before worker 1 has made the update; with several rounds of messages, too."""
    store = dist.FileStore(f"{folder}/store", size)
    for method in (None, BlockInt8(64)):
        began, model = time.perf_counter(), build()
        local, optimizer = LocalSteps(4, delay=3, method=method), sgd(model.parameters())
        local.start(model)
        if rank:
            store.wait([f"worker 0 sent {method}"])
        assert train(local, model, optimizer, range(6), rank) == []
        if rank == 0:
            store.set(f"worker 0 sent {method}", "")
        assert train(local, model, optimizer, range(6, 7), rank) == [7]
        assert local.sync(model)
        local.wait()
        assert 0 < local.waited < time.perf_counter() - began


def checkpointed_while_averages_are_on_their_way(rank: int, size: int, folder: str) -> None:
    """Saved after any update: while one average or both are on their way."""
    on_their_way = {4: [1, 1], 5: [1, 0], 6: [1, 1], 7: [0, 1], 11: [0, 1]}
    for i, method in enumerate((None, {"3": TopK(0.05), "*": BlockInt8(64)})):
        ends = []
        for stops in ([11], on_their_way):
            for stop in stops:
                model = build(seed=rank)
                local = LocalSteps(4, outer=diloco, method=method, fragments=2, delay=3)
                optimizer, place = adamw(model.parameters()), f"{folder}/{i} {len(stops)}"
                with pf.Checkpoint(place, model, optimizer, compressor=local) as checkpoint:
                    at = checkpoint.resume()
                    local.start(model)
                    train(local, model, optimizer, range(at.position["step"] if at else 0, stop), rank)
                    checkpoint.save(step=stop)
                parts = local.state_dict()["fragments"]
                assert [part["flight"] is not None for part in parts] == on_their_way[stop], stop
            ends.append((model.state_dict(), local.state_dict()))
        equal(ends[0], ends[1])


def fewer_workers_apply_what_was_on_its_way(rank: int, size: int, folder: str) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    model = build()
    local = LocalSteps(4, outer=diloco, fragments=2, delay=3)
    optimizer = adamw(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(6), rank)
    alone = LocalSteps(4, outer=diloco, fragments=2, delay=3, group=group)
    alone.load_state_dict(local.state_dict())
    before = {name: x.clone() for name, x in local.state_dict()["anchor"].items()}
    assert train(alone, model, optimizer, range(6, 9), rank) == [7, 9]
    after = alone.state_dict()["anchor"]
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert all(same_everywhere(x) for x in after.values())


def a_switch_while_averages_are_on_their_way(rank: int, size: int, folder: str) -> None:
    """`sync` applies them; the fragments of the low-rank model are new, and what is known of kept tensors stays."""
    model = build()
    local = LocalSteps(4, outer=diloco, method=TopK(0.05), fragments=2, delay=3)
    optimizer = adamw(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(6), rank)
    assert all(part["flight"] for part in local.state_dict()["fragments"])
    with pytest.raises(ValueError, match=r"2 updates .* would be lost; call local.sync"):
        local.start(model)
    local.sync(model)
    for name, x in model.state_dict().items():
        assert same_everywhere(x), name
    before = errors(local)
    momenta = local.state_dict()["outer"]["state"]
    momenta = {name: x["momentum_buffer"].clone() for name, x in momenta.items()}
    switch = pf.Switch(rank=pf.Fixed(4), when=pf.AtEpoch(0), keep=["0", "5"])
    assert switch.step(model, optimizer, epoch=0)
    local.start(model)
    state = local.state_dict()
    now = {name for part in state["fragments"] for name in part["names"]}
    assert {"3.up.weight", "3.down.weight", "0.weight"} <= now
    assert before.keys() == {"3.weight"}  # other tensors are small and sent uncompressed
    assert errors(local) == {}
    after = {name: x["momentum_buffer"] for name, x in state["outer"]["state"].items()}
    assert after.keys() == momenta.keys() & now
    equal(after, {name: momenta[name] for name in after})
    train(local, model, optimizer, range(6, 12), rank)
    local.sync(model)
    for name, x in model.state_dict().items():
        assert same_everywhere(x), name


def errors(local: LocalSteps) -> dict[str, Any]:
    return {name: x for part in local.state_dict()["fragments"] for name, x in part["engine"]["own"].items()}


def what_is_not_finite_is_discarded(rank: int, size: int, folder: str) -> None:
    """All fragments return to the anchor, or other ones would make it NaN again; finite averages are still applied."""
    model = build()
    local = LocalSteps(6, outer=diloco, fragments=3, delay=3)
    optimizer = sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(4), rank)  # fragment 1 is sent after 2 updates, fragment 2 after 4
    if rank == size - 1:
        model[5].weight.data[0] = math.nan
    train(
        local, model, optimizer, range(4, 8), rank
    )  # applied after 5 and 7; fragment 0 is sent after 6, with NaN
    with pytest.warns(
        RuntimeWarning, match=f"of {'this' if rank == size - 1 else 'another'} worker is not finite"
    ):
        train(local, model, optimizer, range(8, 9), rank)
    assert local.lost == 1
    state = local.state_dict()
    assert [part["flight"] is not None for part in state["fragments"]] == [False, False, False]
    for name, x in {**state["anchor"], **state["buffers"]}.items():
        assert x.isfinite().all()
        assert torch.equal(model.state_dict()[name], x), name
        assert same_everywhere(x), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(local, model, optimizer, range(9, 20), rank)
        local.sync(model)
    for name, x in floats(model).items():
        assert x.isfinite().all()
        assert same_everywhere(x), name


def workers_with_other_updates_are_out_of_step(rank: int, size: int, folder: str) -> None:
    model = build()
    local, optimizer = LocalSteps(3, delay=1), sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(2 if rank else 3), rank)
    with pytest.raises(
        RuntimeError, match=r"out of step: worker 0 in LocalSteps.step .*; worker 1 in LocalSteps.sync"
    ):
        local.sync(model)


def each_average_sends_a_fragment(rank: int, size: int, folder: str) -> None:
    model = build()
    local = LocalSteps(4, fragments=2, delay=1)
    local.start(model)
    sent = []
    for step in range(9):
        update(model, sgd(model.parameters()), step, rank)
        local.step(model)
        local.state_dict()  # waits
        sent.append(local.meter.collective_bytes["all_reduce"])
    tensors = floats(model)
    sizes = [sum(tensors[n].numel() for n in names) for names in fragments_of(2)]
    flags = [len(names) + 1 for names in fragments_of(2)]  # which are finite and in use
    a, b = (4 * (n + m) for n, m in zip(sizes, flags, strict=True))
    assert sent == [0, b, b, a + b, a + b, a + 2 * b, a + 2 * b, 2 * a + 2 * b, 2 * a + 2 * b]
    assert local.meter.wire_bytes == sent[-1] * 2 * (size - 1) / size


def two_replicas(rank: int, seed: int = 0) -> tuple[nn.Module, DeviceMesh]:
    """Two replicas of two workers each; batch statistics are off, because they differ inside a replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = build(seed=seed * (rank // 2))
    model[1].eval()
    return model, mesh


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def ddp_or_fsdp2_inside_replicas(rank: int, size: int, folder: str) -> None:
    for engine in ("ddp", "fsdp2"):
        model, mesh = two_replicas(rank, seed=1)
        if engine == "ddp":
            net: nn.Module = DDP(model, process_group=mesh["shard"].get_group())
        else:
            net = shard(model, mesh)
        local = LocalSteps(4, outer=diloco, fragments=2, delay=2, group=mesh["replica"].get_group())
        optimizer = adamw(net.parameters())
        local.start(net)
        train(local, net, optimizer, range(11), rank)
        reference = streaming(2, fragments_of(2), 4, 2, 0.5, 11, adamw, **NESTEROV, pairs=2)[rank // 2]
        for (name, x), y in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(
                whole(x), y, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        net(batch(0, 0)[0])  # leaves whole parameters of the root
        local.sync(net)
        for name, x in model.state_dict().items():
            assert same_everywhere(whole(x)), name


def a_shard_that_is_not_finite_is_discarded_everywhere(rank: int, size: int, folder: str) -> None:
    """Workers that hold finite shards must return to the anchor too."""
    model, mesh = two_replicas(rank)
    shard(model, mesh)
    local = LocalSteps(2, group=mesh["replica"].get_group())
    optimizer = sgd(model.parameters())
    local.start(model)
    before = {name: whole(x).clone() for name, x in model.state_dict().items()}
    train(local, model, optimizer, range(1), rank)
    update(model, optimizer, 1, rank)
    if rank == 3:
        model[3].weight.detach().to_local().fill_(math.nan)
    with pytest.warns(RuntimeWarning, match=f"of {'this' if rank == 3 else 'another'} worker is not finite"):
        local.step(model)
    assert local.lost == 1
    for name, x in model.state_dict().items():
        assert torch.equal(whole(x), before[name]), name


def sharded_replicas_switch(rank: int, size: int, folder: str) -> None:
    model, mesh = two_replicas(rank)
    shard(model, mesh)
    local = LocalSteps(4, outer=diloco, fragments=2, delay=3, group=mesh["replica"].get_group())
    optimizer = adamw(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(6), rank)
    local.sync(model)
    switch = pf.Switch(rank=pf.Fixed(4), when=pf.AtStep(6), keep=["0", "5"])
    model, _ = switch.rebuild(model, optimizer, build=build, shard=lambda net: shard(net, mesh), step=6)
    model[1].eval()
    local.start(model)
    train(local, model, optimizer, range(6, 12), rank)
    local.sync(model)
    assert "3.up.weight" in model.state_dict()
    for name, x in model.state_dict().items():
        assert same_everywhere(whole(x)), name


def sharded_replicas_are_checkpointed(rank: int, size: int, folder: str) -> None:
    ends = []
    for stops in ((9,), (5, 9)):
        for stop in stops:
            model, mesh = two_replicas(rank, seed=stop)
            shard(model, mesh)
            group = mesh["replica"].get_group()
            local = LocalSteps(4, outer=diloco, method=TopK(0.05), fragments=2, delay=3, group=group)
            optimizer = adamw(model.parameters())
            with pf.Checkpoint(f"{folder}/{len(stops)}", model, optimizer, compressor=local) as checkpoint:
                at = checkpoint.resume()
                local.start(model)
                train(local, model, optimizer, range(at.position["step"] if at else 0, stop), rank)
                checkpoint.save(step=stop)
        weights = {
            name: x.to_local() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()
        }
        ends.append((weights, local.state_dict()))
    equal(ends[0], ends[1])


CASES = [
    equals_a_sequential_implementation,
    compression_equals_simulated_workers,
    a_worker_does_not_wait_for_slower_ones,
    checkpointed_while_averages_are_on_their_way,
    fewer_workers_apply_what_was_on_its_way,
    a_switch_while_averages_are_on_their_way,
    what_is_not_finite_is_discarded,
    workers_with_other_updates_are_out_of_step,
    each_average_sends_a_fragment,
]


REPLICAS = [
    ddp_or_fsdp2_inside_replicas,
    a_shard_that_is_not_finite_is_discarded_everywhere,
    sharded_replicas_are_checkpointed,
    sharded_replicas_switch,
]


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in CASES), *((case, 4) for case in REPLICAS)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[..., None], size: int, tmp_path: Path) -> None:
    in_processes(case, size, str(tmp_path))
