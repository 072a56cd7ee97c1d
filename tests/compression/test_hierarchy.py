"""Machines of two workers each, in four real processes on gloo: averages inside, compression between."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hook_state
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import COLLECTIVES, METHODS, build, loss, resumes, wrapped

from processes import in_processes, same_everywhere
from pufferfish.compression import (
    DGC,
    Engine,
    NoCompression,
    PowerSGD,
    Settings,
    Simulated,
    TopK,
    compress,
)
from pufferfish.compression.check_compressor import gradients

#: Methods whose result for two machines' means is that for all workers' gradients.
LINEAR = ("none", "bf16", "fp16", "powersgd", "random", "random, unbiased", "alternating")
NODE = {"hierarchy": "node"}


def on_two_machines(rank: int, size: int, cases: tuple[Callable[[int, int], None], ...]) -> None:
    for case in cases:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        case(rank, size)


def every_collective_resumes(rank: int, size: int) -> None:
    for name in ("none", *COLLECTIVES):
        resumes(rank, size, name, NODE)


def linear_methods_equal_a_flat_hierarchy(rank: int, size: int) -> None:
    for name in LINEAR:
        here = Engine(Settings(METHODS[name], smallest=0, hierarchy="node"))
        flat = Simulated(Settings(METHODS[name], smallest=0), size)
        close = {"rtol": 2e-2, "atol": 2e-2} if name in ("bf16", "fp16") else {"rtol": 1e-3, "atol": 1e-4}
        for step in range(3):
            given = gradients(size, step)
            means, expected = here.average(given[rank]), flat.average(given)[rank]
            for n in given[0]:
                torch.testing.assert_close(
                    means[n], expected[n], **close, msg=lambda m, n=n, name=name: f"{name}, {n}: {m}"
                )
                assert same_everywhere(means[n]), (name, n)


def bytes_inside_a_machine_are_counted_apart(rank: int, size: int) -> None:
    engine = Engine(Settings(NoCompression(), smallest=0, hierarchy="node"))
    engine.average({"w": torch.ones(64, 32)})
    meter, nbytes, flags = engine.meter, 64 * 32 * 4, 2 * 4
    assert meter.wire_bytes == (nbytes + flags if rank % 2 == 0 else 0)  # an all-reduce of two workers: 2 · ½
    assert meter.as_dict()["inside_wire_bytes"] == nbytes + nbytes / 2  # an all-reduce and a broadcast


def error_feedback_belongs_to_the_first_worker(rank: int, size: int) -> None:
    """The others resume without any, and without a warning."""
    ddp, hook = wrapped(TopK(0.05), hierarchy="node")
    loss(ddp, 0, rank).backward()
    assert bool(hook.state_dict()["own"]) == (rank % 2 == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook.load_state_dict(hook.state_dict())
    other, flat = wrapped(TopK(0.05))
    loss(other, 0, rank).backward()
    warning = rf"worker {rank} of 4 \(2 on each machine\) starts with empty error feedback; .* to worker {rank} of 4$"
    with pytest.warns(UserWarning, match=warning):
        hook.load_state_dict(flat.state_dict())


def what_was_not_sent_goes_to_another_method(rank: int, size: int) -> None:
    engine = Engine(Settings(DGC(0.9), smallest=0, hierarchy="node"))
    given = gradients(4)[rank]
    engine.average(given)
    kept: list[Any] = [None] * 4
    dist.all_gather_object(kept, {name: x["v"] for name, x in engine.state_dict()["own"].items() if "v" in x})
    engine.use(replace(engine.settings, method=NoCompression()))
    sent, plain = engine.average(given), Engine(Settings(NoCompression())).average(given)
    for name in ("a.weight", "b.weight"):
        torch.testing.assert_close(sent[name] - plain[name], (kept[0][name] + kept[2][name]) / 2)


def another_hierarchy_starts_with_empty_state(rank: int, size: int) -> None:
    """One worker of a machine has all of the shared state; the others must not start without it."""
    node, flat = (Engine(Settings(PowerSGD(2), smallest=0, hierarchy=h)) for h in ("node", "flat"))  # type: ignore[arg-type]
    node.average(gradients(4)[rank])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty error feedback, on the workers that had some
        flat.load_state_dict(node.state_dict())
    assert same_everywhere(flat.average(gradients(4, 1)[rank])["a.weight"])


def workers_that_disagree_do_not_hang(rank: int, size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank else "4"
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE"):
        compress(DDP(build()), TopK(), settings=Settings(hierarchy="node"))


def a_different_model_on_one_worker_raises_on_all(rank: int, size: int) -> None:
    """A machine of two workers finds it inside, its neighbour between the machines; the fourth is told."""
    right = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}
    for hierarchy in ("node", "flat"):
        engine = Engine(Settings(PowerSGD(2), smallest=0, hierarchy=hierarchy))
        for wrong in ({"c": torch.ones(8, 8)}, {"b": torch.ones(8, 4)}, {"b": torch.ones(8, 8).double()}):
            with pytest.raises(
                ValueError, match=r"[bc] is (missing|float\d\d of shape \[8, [48]\]) on this worker"
            ):
                engine.average({"a": right["a"]} | wrong if rank == 2 else right)
        torch.testing.assert_close(engine.average(right)["a"], right["a"])


def one_machine_compresses_nothing(rank: int, size: int) -> None:
    """Its first worker warns."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(Settings(TopK(0.05), smallest=0, hierarchy="node"))
    assert [str(w.message) for w in caught] == [
        f"hierarchy: all {size} workers are on one machine, so nothing is compressed; "
        'hierarchy="flat" compresses between them'
    ] * (rank == 0)
    engine.average(gradients(size)[rank])
    assert engine.meter.wire_bytes == 0


def local_world_size_is_checked(rank: int, size: int) -> None:
    for local, message in (
        ("3", "LOCAL_WORLD_SIZE is 3, which does not divide 4 workers"),
        ("", "LOCAL_WORLD_SIZE is not set"),
        ("0", "LOCAL_WORLD_SIZE is 0"),
    ):
        os.environ["LOCAL_WORLD_SIZE"] = local
        with pytest.raises(ValueError, match=message):
            Engine(Settings(TopK(), hierarchy="node"))


def through_a_switch_and_another_method(rank: int, size: int) -> None:
    hook_state.through_a_switch_and_another_method(rank, size, NODE)


def bad_steps_leave_no_trace(rank: int, size: int) -> None:
    hook_state.a_bad_first_bucket_leaves_no_trace(rank, size, NODE)


@pytest.mark.timeout(240)  # against deadlocks
@pytest.mark.parametrize(
    "cases",
    [
        (linear_methods_equal_a_flat_hierarchy, every_collective_resumes, bad_steps_leave_no_trace),
        (
            error_feedback_belongs_to_the_first_worker,
            what_was_not_sent_goes_to_another_method,
            another_hierarchy_starts_with_empty_state,
            through_a_switch_and_another_method,
        ),
        (
            bytes_inside_a_machine_are_counted_apart,
            one_machine_compresses_nothing,
            local_world_size_is_checked,
            a_different_model_on_one_worker_raises_on_all,
            workers_that_disagree_do_not_hang,
        ),
    ],
    ids=["numbers", "state", "groups"],
)
def test_machines_of_two_workers(cases: tuple[Callable[[int, int], None], ...]) -> None:
    in_processes(on_two_machines, 4, cases)


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed"):
        Engine(Settings(TopK(), hierarchy="node"))
    with pytest.raises(ValueError, match="is neither"):
        Settings(TopK(), hierarchy="machine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs process groups; SimulatedTransport is flat"):
        Simulated(Settings(TopK(), hierarchy="node"), 4)
