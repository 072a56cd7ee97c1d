"""`sharded`: the messages of a step whose weights are sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from .cost_model import Work, buckets


def sharded(work: Work, weights: Mapping[str, Tensor], size: int, itemsize: int | None = None) -> Work:
    """Weights are gathered for forward and again for backward, gradients reduced to their shards.

    The groups are taken to be pieces of 25 MiB, the next of which is gathered while one computes. Every worker
    updates its shard alone.

    Args:
        itemsize: bytes of an element on the wire, by a mixed-precision policy; None: those of the weights.

    >>> import torch
    >>> work = sharded(Work(forward=1.0, backward=2.0, optimizer=0.4), {"w": torch.ones(1000)}, 4)
    >>> work.gathers, work.messages, work.optimizer
    ((('all_gather', 1000),), (('all_gather', 1000), ('reduce_scatter', 4000)), 0.1)
    """
    nbytes = (
        x.nbytes if itemsize is None else x.numel() * itemsize for x in reversed(list(weights.values()))
    )
    sizes = tuple(buckets(nbytes))
    messages = tuple(m for n in sizes for m in (("all_gather", n // size), ("reduce_scatter", n)))
    return replace(
        work,
        optimizer=work.optimizer / size,
        gathers=tuple(("all_gather", n // size) for n in reversed(sizes)),
        messages=messages,
        overlaps=True,
        handed=(),
        buffers=0,
    )
