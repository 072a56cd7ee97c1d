"""`exact_`: gradients averaged so that a restarted job goes on bit for bit as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucket_hook import AtLastBucket, refuse_hookless, register, wrapper

_PIECE = 25 * 2**20  # bytes of one message; a larger parameter is a message of its own


def exact_(model: nn.Module) -> None:
    """Make a DDP model's gradient averages independent of DDP's buckets, in place.

    With three or more workers the last bit of a sum depends on where a number stands in a message. DDP lays
    its messages out in buckets, and a restarted job has other buckets than one that has run for a while. Here
    they are laid out in the order of the model's parameters, so that on the same number of workers and the
    same hardware a resumed run equals the uninterrupted one. Two workers are exact without it.

    The price: the exchange starts when the backward pass is over, where plain DDP overlaps the two, and each
    message (25 MiB, or the largest parameter) is copied once. The hook stays through a `Switch`.

    Args:
        model: wrapped in DistributedDataParallel, compiled or not, without a communication hook so far.

    >>> exact_(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: exact_: a Linear is not wrapped in DistributedDataParallel; wrap it first
    """
    ddp = wrapper(model, "exact_")
    refuse_hookless(ddp, "exact_")
    register(ddp, Exact(ddp.module, ddp.process_group))


class Exact(AtLastBucket):
    """Averages laid out in the order of the model's parameters."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module = module  # not the wrapper, which holds this: through C++ no such cycle is ever freed
        self.group = group

    def average(self, buckets: list[Any]) -> None:
        """All gradients, in place. The parameters are looked up each time: a switch replaces them."""
        of = {id(p): g for b in buckets for p, g in zip(b.parameters(), b.gradients(), strict=True)}
        for piece in _pieces([of[id(p)] for p in self.module.parameters() if id(p) in of]):
            message = torch.cat([g.reshape(-1) for g in piece])
            message /= dist.get_world_size(self.group)  # before the sum, as DDP does: fp16 may overflow
            dist.all_reduce(message, group=self.group)
            parts = message.split([g.numel() for g in piece])
            torch._foreach_copy_(piece, [part.view(g.shape) for part, g in zip(parts, piece, strict=True)])


def _pieces(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """One message each: neighbours of one dtype and device. Only names, shapes and dtypes decide."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for g in gradients:
        kinds.setdefault((g.dtype, g.device), []).append(g)
    for kind in kinds.values():
        piece: list[Tensor] = []
        size = 0
        for g in kind:
            if piece and size + g.nbytes > _PIECE:
                yield piece
                piece, size = [], 0
            piece.append(g)
            size += g.nbytes
        yield piece
