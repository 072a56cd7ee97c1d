"""Exchange during the backward pass, in real processes on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hook_state
import pytest
import torch
from training import (
    COLLECTIVES,
    METHODS,
    gradients_are_those_of_simulated_workers,
    grads,
    loss,
    momentum,
    resumes,
    train,
    weights,
    wrapped,
)

from processes import in_processes, same_everywhere
from pufferfish.compression import (
    Engine,
    NoCompression,
    PowerSGD,
    Settings,
    Simulated,
    TopK,
    engine,
)
from pufferfish.compression.check_compressor import gradients

OVERLAP = {"overlap": True}
#: One method for each collective, error feedback of a worker and of an owner, and several methods in one bucket.
EACH_KIND = ("none", "several", *COLLECTIVES)
REST = tuple(name for name in METHODS if name not in EACH_KIND)


def with_small_buckets(rank: int, size: int, case: Callable[..., None], *args: Any) -> None:
    engine.BUCKET = 1000  # bytes: several in this network
    case(rank, size, *args)


def every_method(rank: int, size: int, case: Callable[..., None], names: tuple[str, ...]) -> None:
    for name in names:
        case(rank, size, name, OVERLAP)


def sent_before_the_end(rank: int, options: dict[str, Any]) -> list[int]:
    """Messages sent before the gradient of the first layer, which comes last, is there; for each step."""
    ddp, hook = wrapped(NoCompression(), **options)
    sent, before = [], 0
    ddp.module.first.weight.register_hook(lambda g: sent.append(hook.meter.messages - before))
    for step in range(4):
        before = hook.meter.messages
        loss(ddp, step, rank).backward()
    return sent


def buckets_are_sent_early(rank: int, size: int) -> None:
    early, late = (sent_before_the_end(rank, options) for options in (OVERLAP, {"overlap": False}))
    assert late == [0] * 4
    assert early[0] == 0  # the order is not known in the first pass
    assert early[2] == early[3] > 0
    assert sent_before_the_end(rank, {}) == early  # the default for uncompressed averages


def buckets_are_independent_of_ddps(rank: int, size: int) -> None:
    """Neither DDP's buckets nor the first step, in which all is sent at once, change a bit."""
    ends = []
    for cap in (0.0001, 0.002, 25):
        ddp, _ = wrapped(PowerSGD(2), ddp={"bucket_cap_mb": cap}, overlap=True)
        train(ddp, momentum(ddp), range(4), rank)
        ends.append(weights(ddp))
    assert all(torch.equal(end, ends[0]) for end in ends)


def unused_parameters_come_late(rank: int, size: int) -> None:
    """DDP gives them zeros, in a bucket that may be complete last."""
    ddp, hook = wrapped(TopK(0.05), maybe=True, overlap=True)
    for step in range(4):
        loss(ddp, step, rank, maybe=step % 2 == 0).backward()
    assert hook.meter.steps == 4
    assert same_everywhere(torch.cat([g.flatten() for g in grads(ddp.module).values()]))


def the_order_of_gradients_does_not_matter(rank: int, size: int) -> None:
    given = gradients(size)
    mine = dict(reversed(given[rank].items())) if rank else given[rank]
    means = Engine(Settings(NoCompression())).average(mine)
    for name, x in Simulated(Settings(NoCompression()), size).average(given)[0].items():
        torch.testing.assert_close(means[name], x)


def through_a_switch_and_another_method(rank: int, size: int) -> None:
    hook_state.through_a_switch_and_another_method(rank, size, OVERLAP)


def a_bad_first_bucket_leaves_no_trace(rank: int, size: int) -> None:
    hook_state.a_bad_first_bucket_leaves_no_trace(rank, size, OVERLAP)


def gradients_are_views_of_buckets(rank: int, size: int) -> None:
    gradients_are_those_of_simulated_workers(rank, size, "bf16", OVERLAP, gradient_as_bucket_view=True)


def a_static_graph(rank: int, size: int) -> None:
    gradients_are_those_of_simulated_workers(rank, size, "bf16", OVERLAP, static_graph=True)


@pytest.mark.timeout(240)  # against deadlocks
@pytest.mark.parametrize(
    "names", [EACH_KIND, pytest.param(REST, marks=pytest.mark.slow)], ids=["each kind", "rest"]
)
@pytest.mark.parametrize("case", [gradients_are_those_of_simulated_workers, resumes])
def test_every_method(case: Callable[..., None], names: tuple[str, ...]) -> None:
    in_processes(with_small_buckets, 2, every_method, case, names)


@pytest.mark.timeout(240)
def test_every_collective_with_four_workers() -> None:
    """Sums of more than two terms, and shares of several owners."""
    in_processes(with_small_buckets, 4, every_method, gradients_are_those_of_simulated_workers, COLLECTIVES)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case",
    [
        the_order_of_gradients_does_not_matter,
        buckets_are_sent_early,
        buckets_are_independent_of_ddps,
        through_a_switch_and_another_method,
        unused_parameters_come_late,
        a_bad_first_bucket_leaves_no_trace,
        gradients_are_views_of_buckets,
        a_static_graph,
    ],
)
def test_during_the_backward_pass(case: Callable[..., None]) -> None:
    in_processes(with_small_buckets, 2, case)
