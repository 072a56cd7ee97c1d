"""Methods on a GPU: the same promises, no waiting for the device in an ordinary step, and DDP over NCCL and gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import training

from processes import in_processes
from pufferfish.compression import Accordion, Aggregator, Atomo, Method, Simulated, Threshold, aggregator
from pufferfish.compression.check_compressor import check_compressor, gradients

METHODS = [m for m in training.METHODS.values() if isinstance(m, Method)]
#: Their messages' sizes, or an SVD, depend on numbers that only the device knows.
WAITING = (Threshold, Accordion, Atomo)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_properties(method: Method) -> None:
    before = torch.cuda.get_rng_state()
    check_compressor(method, sizes=(1, 2), draws=100, device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, WAITING)], ids=repr)
def test_nothing_waits(method: Method, scope: str) -> None:
    if scope == "global" and not method.sparse:
        pytest.skip("for methods that choose elements")
    simulated = Aggregator(method, Simulated(2), smallest=0, scope=scope)  # type: ignore[arg-type]
    given = [gradients(2, step, "cuda") for step in range(6)]
    for g in given[:4]:  # DGC's warm-up is over by then
        simulated.together(g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for g in given[4:]:
            simulated.together(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = simulated.meter.seconds
    assert min(seconds.values()) > 0


def cases(rank: int, size: int) -> None:
    """Every method through DDP, as the CPU tests have it, at the last bucket and before."""
    torch.backends.cudnn.deterministic = True
    training.DEVICE = "cuda"
    aggregator.PIECE = 1000  # type: ignore[attr-defined]  # bytes: several in this network
    for options in ({}, {"overlap": True}):
        for name in training.METHODS:
            training.gradients_are_the_aggregators(name, rank, size, options)
            training.resumes(name, rank, options)


def two_levels(rank: int, size: int) -> None:
    training.DEVICE = "cuda"
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name in ("none", "powersgd", "topk", "int8"):
        training.resumes(name, rank, {"levels": "node"})


@pytest.mark.timeout(200)
def test_ddp_on_nccl(tmp_path: Path) -> None:
    in_processes(cases, 1, backend="nccl")


@pytest.mark.timeout(300)
def test_ddp_on_gloo(tmp_path: Path) -> None:
    """Two processes that share the device."""
    in_processes(cases, 2)


@pytest.mark.timeout(200)
def test_machines_of_several_workers(tmp_path: Path) -> None:
    in_processes(two_levels, 4)
