"""Ways of running, in real processes on gloo: during the backward pass, on two levels, by another collective."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    METHODS,
    build,
    gradients_are_the_aggregators,
    grads,
    loss,
    momentum,
    resumes,
    train,
    weights,
    wrapped,
)

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import (
    Aggregator,
    NoCompression,
    PowerSGD,
    Simulated,
    TopK,
    aggregator,
    compress,
)
from pufferfish.compression.check_compressor import gradients

#: What one machine's mean, exchanged by these, makes of the others' is what all workers' would be.
LINEAR = ("none", "bf16", "fp16", "powersgd", "random", "random, unbiased", "alternating")
OVERLAP = {"overlap": True}


def sent_before_the_end(options: dict[str, Any], rank: int) -> list[int]:
    """Messages that have left when the gradient of the first layer, which comes last, is there; for each step."""
    ddp, hook = wrapped(NoCompression(), **options)
    found, before = [], 0
    ddp.module.first.weight.register_hook(lambda g: found.append(hook.meter.messages - before))
    for step in range(4):
        before = hook.meter.messages
        loss(ddp, step, rank).backward()
    return found


def pieces_go_out_early(rank: int) -> None:
    early, late = (sent_before_the_end(options, rank) for options in (OVERLAP, {"overlap": False}))
    assert late == [0] * 4
    assert early[0] == 0  # the first pass has to learn the order
    assert early[2] == early[3] > 0
    assert sent_before_the_end({}, rank) == early  # the default, for plain averages


def pieces_are_the_models(rank: int, size: int) -> None:
    """Neither DDP's buckets nor the first step, in which all goes out at once, change a bit."""
    ends = []
    for cap in (0.0001, 0.002, 25):
        ddp, _ = wrapped(PowerSGD(2), ddp={"bucket_cap_mb": cap}, overlap=True)
        train(ddp, momentum(ddp), range(4), rank)
        ends.append(weights(ddp))
    assert all(torch.equal(end, ends[0]) for end in ends)


def through_a_switch(rank: int, **options: Any) -> None:
    """Parameters are replaced while pieces are known; the next pass learns them anew."""
    ddp, hook = wrapped(TopK(0.05), **options)
    optimizer = momentum(ddp)
    train(ddp, optimizer, range(3), rank)
    assert pf.Switch(rank=4, when=pf.AtStep(0)).step(ddp, optimizer, step=0)
    train(ddp, optimizer, range(3, 6), rank)
    hook.use(NoCompression())
    train(ddp, optimizer, range(6, 9), rank)
    assert same_everywhere(weights(ddp))
    assert hook.meter.steps == 9


def other_parameters_in_the_middle(rank: int) -> None:
    """Unused ones come late, and with zeros."""
    ddp, hook = wrapped(TopK(0.05), maybe=True, overlap=True)
    for step in range(4):
        loss(ddp, step, rank, maybe=step % 2 == 0).backward()
    assert hook.meter.steps == 4
    assert same_everywhere(torch.cat([g.flatten() for g in grads(ddp.module).values()]))


def an_aggregator_does_not_mind_the_order(rank: int, size: int) -> None:
    given = gradients(size)
    mine = dict(reversed(given[rank].items())) if rank else given[rank]
    found = Aggregator(NoCompression())(mine)
    for n, x in Aggregator(NoCompression(), Simulated(size)).together(given)[0].items():
        torch.testing.assert_close(found[n], x)


def overlapping(rank: int, size: int, folder: Path) -> None:
    aggregator.PIECE = 1000  # type: ignore[attr-defined]  # bytes: several in this network
    for name in METHODS:
        gradients_are_the_aggregators(name, rank, size, OVERLAP)
        resumes(name, rank, OVERLAP)
    an_aggregator_does_not_mind_the_order(rank, size)
    pieces_go_out_early(rank)
    pieces_are_the_models(rank, size)
    through_a_switch(rank, overlap=True)
    other_parameters_in_the_middle(rank)
    bad_steps_leave_no_trace(rank, overlap=True)
    if size == 2:
        gradients_are_the_aggregators("bf16", rank, size, OVERLAP, gradient_as_bucket_view=True)
        gradients_are_the_aggregators("bf16", rank, size, OVERLAP, static_graph=True)
        with pytest.raises(ValueError, match=r"overlap=True: scope=.global. and levels"):
            compress(DDP(build()), TopK(), scope="global", overlap=True)


def bad_steps_leave_no_trace(rank: int, **options: Any) -> None:
    """NaN on one rank, in the piece that goes out first: all gradients are NaN on all, all memories as before."""
    ddp, hook = wrapped(TopK(0.05), **options)
    for step in range(2):
        loss(ddp, step, rank).backward()
    before = hook.state_dict()["own"][0]
    handle = ddp.module.last.weight.register_hook(lambda g: g * float("nan")) if rank == 1 else None
    ddp.zero_grad()
    loss(ddp, 2, rank).backward()
    assert all(g.isnan().all() for g in grads(ddp.module).values())
    after = hook.state_dict()["own"][0]
    assert before.keys() == after.keys()
    for name, state in before.items():
        assert torch.equal(state["memory"], after[name]["memory"]), name
    if handle is not None:
        handle.remove()
    ddp.zero_grad()
    loss(ddp, 3, rank).backward()
    assert all(g.isfinite().all() for g in grads(ddp.module).values())


def two_levels_equal_one(name: str, rank: int, size: int) -> None:
    """Machines of two: what travels between them is one mean for each, the result that of all workers."""
    method = {"a": PowerSGD(2), "*": PowerSGD(1)} if name == "several" else METHODS[name]
    here, flat = (
        Aggregator(method, group, smallest=0, levels=levels)
        for group, levels in ((None, "node"), (Simulated(size), "flat"))
    )
    close = {"rtol": 2e-2, "atol": 2e-2} if name in ("bf16", "fp16") else {"rtol": 1e-3, "atol": 1e-4}
    for step in range(3):
        given = gradients(size, step)
        found, expected = here(given[rank]), flat.together(given)[rank]
        for n in given[0]:
            torch.testing.assert_close(found[n], expected[n], **close, msg=lambda m, n=n: f"{name}, {n}: {m}")
            assert same_everywhere(found[n]), (name, n)


def bytes_are_counted_apart(rank: int, size: int) -> None:
    node = Aggregator(NoCompression(), smallest=0, levels="node")
    node({"w": torch.ones(64, 32), "v": torch.ones(64, 32)})
    flags = 3 * 4
    half = 64 * 32 * 4  # each of two workers owns one of two equal tensors
    assert node.meter.wire_bytes == half + flags  # an all-reduce between two machines: 2 · ½
    assert (
        node.meter.inside_wire_bytes == (half + half) + flags
    )  # reduce-scatter: 2·half · ½; all-gather: half
    assert node.meter.handed["reduce_scatter"] == 2 * half
    assert node.meter.as_dict()["inside_wire_bytes"] == node.meter.inside_wire_bytes


def memories_belong_to_machines(rank: int) -> None:
    """Each worker keeps those of the tensors it owns, and its neighbour on the other machine keeps the same ones."""
    ddp, hook = wrapped(TopK(0.05), levels="node")
    loss(ddp, 0, rank).backward()
    mine = sorted(hook.state_dict()["own"][0])
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, mine)
    assert everyone[0] == everyone[2]
    assert everyone[1] == everyone[3]
    assert not set(everyone[0]) & set(everyone[1])
    other, flat = wrapped(TopK(0.05))
    loss(other, 0, rank).backward()
    with pytest.warns(UserWarning, match=r"of 4, 2 a machine starts with empty memories; .* of 4$"):
        hook.load_state_dict(flat.state_dict())


def memories_find_their_new_owners(rank: int) -> None:
    """A tensor that the switch left alone, but gave to another worker of its machine, keeps what waits."""
    node = Aggregator(TopK(0.05), smallest=0, levels="node")
    given = gradients(4)[rank]
    node(given)
    owners = node.nodes.owners(given)
    fewer = {name: g for name, g in given.items() if name != "c.weight"}  # the largest, so that others move
    moved = [
        n
        for n in fewer
        for a, b in zip(owners, node.nodes.owners(fewer), strict=True)
        if n in b and n not in a
    ]
    before: list[Any] = [None] * 4
    dist.all_gather_object(before, {n: s["memory"] for n, s in node.state_dict()["own"][0].items()})
    node({name: torch.zeros_like(g) for name, g in fewer.items()})  # unused: all memories stay
    mine = node.state_dict()["own"][0]
    assert set(moved) & {"a.weight", "b.weight"}
    for name in [n for n in mine if n in moved]:
        neighbour = before[rank ^ 1]  # in the same machine
        assert torch.equal(mine[name]["memory"], neighbour[name]), name


def other_levels_start_anew(rank: int) -> None:
    """Of what all share each worker of a machine has a part only: ranks must not go on with different things."""
    node, flat = (Aggregator(PowerSGD(2), smallest=0, levels=levels) for levels in ("node", "flat"))
    node(gradients(4)[rank])
    with pytest.warns(UserWarning, match="starts with empty memories"):
        flat.load_state_dict(node.state_dict())
    assert same_everywhere(flat(gradients(4, 1)[rank])["a.weight"])


def ranks_that_disagree_do_not_wait(rank: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank else "4"
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE"):
        compress(DDP(build()), TopK(), levels="node")
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def one_machine_compresses_nothing(rank: int, size: int) -> None:
    """It is told once, by its first worker."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        node = Aggregator(TopK(0.05), smallest=0, levels="node")
    assert [str(w.message) for w in told] == [
        f"levels: all {size} workers are on one machine, so nothing is compressed; "
        'levels="flat" compresses between them'
    ] * (rank == 0)
    node(gradients(size)[rank])
    assert node.meter.wire_bytes == 0
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def given_groups(rank: int) -> None:
    """Ranks that alternate between two machines."""
    machines = [[0, 2], [1, 3]]
    groups = [
        next(dist.new_group(ranks, use_local_synchronization=True) for ranks in sides if rank in ranks)
        for sides in (machines, [[0, 1], [2, 3]])
    ]
    given = gradients(4)
    found = Aggregator(NoCompression(), levels=(groups[0], groups[1]))(given[rank])
    for n, mean in Aggregator(NoCompression(), Simulated(4)).together(given)[0].items():
        torch.testing.assert_close(found[n], mean)


def on_two_levels(rank: int, size: int, folder: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name in METHODS:
        if name in LINEAR:
            two_levels_equal_one(name, rank, size)
        resumes(name, rank, {"levels": "node"})
    bytes_are_counted_apart(rank, size)
    memories_belong_to_machines(rank)
    bad_steps_leave_no_trace(rank, levels="node")
    through_a_switch(rank, levels="node")
    given_groups(rank)
    memories_find_their_new_owners(rank)
    other_levels_start_anew(rank)
    ranks_that_disagree_do_not_wait(rank)
    one_machine_compresses_nothing(rank, size)
    for local, told in (("3", "workers a machine do not make 4"), ("", "is not set"), ("0", "do not make")):
        os.environ["LOCAL_WORLD_SIZE"] = local
        with pytest.raises(ValueError, match=told):
            Aggregator(TopK(), levels="node")
    with pytest.raises(ValueError, match="has one level"):
        Aggregator(TopK(), Simulated(4), levels="node")


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize("size", [2, 4])
def test_during_the_backward_pass(size: int, tmp_path: Path) -> None:
    in_processes(overlapping, size, tmp_path)


@pytest.mark.timeout(240)
def test_machines_of_several_workers(tmp_path: Path) -> None:
    in_processes(on_two_levels, 4, tmp_path)


def test_levels_are_checked() -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed"):
        Aggregator(TopK(), levels="node")
    with pytest.raises(ValueError, match="is neither"):
        Aggregator(TopK(), levels="machine")  # type: ignore[arg-type]
