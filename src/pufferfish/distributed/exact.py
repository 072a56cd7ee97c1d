"""`exact_`: averages of gradients with which a resumed job is bit-identical to an uninterrupted one."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ddp import AtLastBucket, check_hookable, ddp_of, gradients_in, register_hook

_PIECE = 25 * 2**20  # bytes of one message; a larger parameter is sent alone


def exact_(model: nn.Module) -> None:
    """Make the gradient averages of a DDP model independent of its buckets, in place.

    With three or more workers the last bit of a sum depends on the position of a number in a message. DDP's messages
    are its buckets, and the buckets of a resumed job differ from those of one that has run for a while. Here messages
    follow the order of the model's parameters, so that on the same number of workers and the same hardware a resumed
    run is bit-identical to an uninterrupted one. Two workers do not need `exact_` for this.

    Cost: the exchange starts after the backward pass, while plain DDP overlaps both, and each message (25 MiB, or the
    largest parameter) is copied once. The hook remains after a `Switch`.

    Args:
        model: Wrapped in DistributedDataParallel, compiled or not, without a communication hook.

    >>> exact_(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: exact_: the Linear is not wrapped in DistributedDataParallel; wrap it first
    """
    ddp = ddp_of(model, "exact_")
    check_hookable(ddp, "exact_")
    register_hook(ddp, Exact(ddp.module, ddp.process_group))


class Exact(AtLastBucket):
    """Hook state that averages gradients in the order of the model's parameters."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        # Not the wrapper, which holds this object: the cycle through C++ would never be freed.
        self.module = module
        self.group = group

    def average(self, buckets: list[Any]) -> None:
        """Average all gradients, in place. Parameters are looked up each time, because a switch replaces them."""
        gradients = {id(p): g for b in buckets for p, g in gradients_in(b)}
        for piece in _pieces([gradients[id(p)] for p in self.module.parameters() if id(p) in gradients]):
            message = torch.cat([g.reshape(-1) for g in piece])
            message /= dist.get_world_size(self.group)  # before the sum, like DDP: a sum in fp16 may overflow
            dist.all_reduce(message, group=self.group)
            parts = message.split([g.numel() for g in piece])
            torch._foreach_copy_(piece, [part.view(g.shape) for part, g in zip(parts, piece, strict=True)])


def _pieces(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split gradients into messages of one dtype and device. Depends only on their order, shapes and dtypes."""
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
