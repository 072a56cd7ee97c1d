"""Real processes for distributed tests: one process group, many cases inside it, and a clean end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


def in_processes(
    cases: Callable[..., None], size: int, folder: Path, *args: object, backend: str = "gloo"
) -> None:
    """Call `cases(rank, size, *args)` in `size` new processes that form a group; an error in any is raised here."""
    mp.spawn(_worker, (cases, size, str(folder / f"store-{size}"), backend, args), nprocs=size, join=True)


def same_everywhere(x: Tensor) -> bool:
    """Whether this rank holds the bits of rank 0."""
    theirs = x.detach().clone()
    dist.broadcast(theirs, 0)
    return torch.equal(theirs, x)


def _worker(
    rank: int, cases: Callable[..., None], size: int, store: str, backend: str, args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        cases(rank, size, *args)
        dist.barrier()
    finally:
        gc.collect()  # whatever still holds the group goes before it; else gloo may abort the process
        dist.destroy_process_group()
