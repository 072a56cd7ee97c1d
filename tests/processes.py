"""Real processes for distributed tests: one process group for each call, a time limit, and no process left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import pufferfish.api
import pufferfish.lab.train

_IMPORTED = [module.__name__ for module in (torch, dist, torch._dynamo, pufferfish.api, pufferfish.lab.train)]


def preload(*names: str) -> None:
    """Workers are forked from a server that has imported this: 0.1 s for a group instead of 3 s for each process.

    For modules of tests, which pytest imports before the server starts.
    """
    _IMPORTED.extend(names)
    multiprocessing.set_forkserver_preload(_IMPORTED)


preload("hypothesis", "pytest", "safetensors.torch", "torchft")

#: Seconds after which a hanging group is killed.
LIMIT = 180


def in_processes(
    case: Callable[..., None], size: int, *args: object, backend: str = "gloo", limit: float = LIMIT
) -> None:
    """Call `case(rank, size, *args)` in `size` new processes that form a group; re-raise the first error here."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        forked(
            _worker,
            size,
            (case, size, store, backend, args),
            limit=limit,
            name=getattr(case, "__name__", "case"),
        )


def forked(
    work: Callable[..., None], size: int, args: tuple[object, ...], *, limit: float = LIMIT, name: str
) -> None:
    """Call `work(rank, *args)` in `size` new processes; re-raise the first error here."""
    # A process with CUDA cannot be forked.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    workers = mp.start_processes(_forked, (work, args), nprocs=size, join=False, start_method=method)
    assert workers is not None
    end = time.monotonic() + limit
    try:
        while not workers.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"{name}: {size} workers did not finish in {limit:g} s")
    finally:
        for process in workers.processes:
            process.kill()
            process.join()


def _forked(rank: int, work: Callable[..., None], args: tuple[object, ...]) -> None:
    gc.freeze()  # collections skip the thousands of objects that the server has imported
    torch.set_num_threads(1)
    work(rank, *args)


def as_torchrun(rank: int, size: int, port: int) -> None:
    """Set the environment variables that torchrun sets, for a worker on the CPU."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def free_port() -> int:
    """A TCP port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def same_everywhere(x: Tensor) -> bool:
    """Whether this rank holds the bits of rank 0."""
    theirs = x.detach().clone()
    dist.broadcast(theirs, 0)
    return torch.equal(theirs, x)


def _worker(
    rank: int, case: Callable[..., None], size: int, store: str, backend: str, args: tuple[object, ...]
) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        case(rank, size, *args)
        dist.barrier()
    finally:
        gc.collect()  # whatever still holds the group goes before it; else gloo may abort the process
        dist.destroy_process_group()
