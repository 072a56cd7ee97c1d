"""Methods on a GPU: the same properties, no wait for the device in an ordinary step, DDP over NCCL and gloo."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import training

from processes import in_processes
from pufferfish.compression import (
    Accordion,
    Atomo,
    Method,
    Settings,
    Simulated,
    SparseLoCo,
    Threshold,
    engine,
)
from pufferfish.compression.check_compressor import check_compressor, gradients

METHODS = [m for m in training.METHODS.values() if isinstance(m, Method)]
#: With error feedback that loses nothing.
LOSSLESS = [replace(m, decay=1.0) if isinstance(m, SparseLoCo) else m for m in METHODS]
#: They read numbers back: the sizes of messages, flags, or those of an SVD.
WAITING = (Threshold, Accordion, Atomo)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", LOSSLESS, ids=repr)
def test_properties(method: Method) -> None:
    before = torch.cuda.get_rng_state()
    check_compressor(method, sizes=(1, 2), draws=100, device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, WAITING)], ids=repr)
def test_nothing_waits(method: Method, scope: str) -> None:
    if scope == "global" and method.layout != "elements":
        pytest.skip("for methods that choose elements")
    simulated = Simulated(Settings(method, smallest=0, scope=scope), 2)  # type: ignore[arg-type]
    given = [gradients(2, step, "cuda") for step in range(6)]
    for g in given[:4]:  # DGC's warm-up is over by then
        simulated.average(g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for g in given[4:]:
            simulated.average(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = simulated.meter.seconds
    assert min(seconds.values()) > 0


def every_method(rank: int, size: int) -> None:
    """Every method through DDP, with and without overlap."""
    torch.backends.cudnn.deterministic = True
    training.DEVICE = "cuda"
    engine.BUCKET = 1000  # bytes: several in this network
    for options in ({}, {"overlap": True}):
        for name in training.METHODS:
            training.gradients_are_those_of_simulated_workers(rank, size, name, options)
            training.resumes(rank, size, name, options)


def two_machines(rank: int, size: int) -> None:
    training.DEVICE = "cuda"
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name in ("none", "powersgd", "topk", "int8"):
        training.resumes(rank, size, name, {"hierarchy": "node"})


@pytest.mark.timeout(200)
def test_ddp_on_nccl() -> None:
    in_processes(every_method, 1, backend="nccl")


@pytest.mark.timeout(300)
def test_ddp_on_gloo() -> None:
    """Two processes that share the device."""
    in_processes(every_method, 2)


@pytest.mark.timeout(200)
def test_machines_of_several_workers() -> None:
    in_processes(two_machines, 4)
