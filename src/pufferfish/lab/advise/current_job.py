"""The workers of the job that this process is one of, if it is."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ...distributed.workers import Workers


def in_job() -> bool:
    """Whether there are other workers in this job."""
    return dist.is_initialized() and dist.get_world_size() > 1


def shared(values: list[float], slowest: bool = False) -> list[float]:
    """Means over the workers of this job, or the largest of theirs; equal on all of them.

    >>> shared([1.0, 2.0])
    [1.0, 2.0]
    """
    if not in_job():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX if slowest else dist.ReduceOp.SUM)
    return [float(x) / (1 if slowest else dist.get_world_size()) for x in found.cpu()]


def told(value: Any) -> Any:
    """Rank 0's value, which JSON can hold, on all of them: what all decide by must not differ.

    >>> told([1, 2])
    [1, 2]
    """
    if not in_job():
        return value
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return json.loads(Workers(dist.group.WORLD, device, "advise").tell(json.dumps(value)))
