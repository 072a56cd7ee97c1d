"""Messages of a training step: plain DDP, compressed DDP, FSDP2."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..compression.settings import Methods
from ..layers.names import own_name
from ..local.fragments import Schedule, split_by_depth
from .cost_model import Work
from .dry_run import dry_run
from .local_exchange import LocalExchange

MIB = 2**20


def with_ddp_messages(work: Work, parameters: Mapping[str, Tensor], cap: int = 25) -> Work:
    """Return `work` with plain DDP's messages for the gradients of `parameters`, in buckets of `cap` MiB.

    >>> import torch
    >>> with_ddp_messages(Work(forward=1.0, backward=1.0), {"w": torch.ones(10)}).messages
    (('all_reduce', 40),)
    """
    sizes = tuple(ddp_bucket_bytes((x.nbytes for x in reversed(list(parameters.values()))), cap * MIB))
    messages = tuple(("all_reduce", n) for n in sizes)
    return replace(work, messages=messages, overlaps=True, bucket_bytes=sizes)


def with_local_exchange(
    work: Work,
    schedule: Schedule,
    method: Methods,
    parameters: Mapping[str, Tensor],
    size: int,
    device: torch.device | None = None,
) -> Work:
    """Return `work` with the averages of local steps among `size` workers, from dry runs, instead of other messages.

    >>> import torch
    >>> from pufferfish.compression import NoCompression
    >>> work = with_local_exchange(Work(forward=1.0, backward=1.0), Schedule(h=4), NoCompression(), {"w": torch.ones(8)}, 2)
    >>> work.local.fragments[0].messages  # 8 bytes say whether all values are finite
    (('all_reduce', 40),)
    """
    sizes = {name: x.numel() for name, x in parameters.items()}
    split = split_by_depth(sizes, schedule.fragments)
    runs = [dry_run(method, {n: parameters[n] for n in names}, size, device=device) for names in split]
    return replace(
        work,
        local=LocalExchange(schedule, tuple(runs)),
        messages=(),
        overlaps=False,
        bucket_bytes=(),
        buffer_bytes=0,
        encode=0.0,
        decode=0.0,
    )


def ddp_bucket_bytes(sizes: Iterable[int], cap: float = 25 * MIB, first: float = MIB) -> list[int]:
    """Bytes of DDP's buckets for gradients of `sizes` bytes, in the order they become available.

    A bucket is full at `cap` bytes, the first one at `first` bytes.

    >>> ddp_bucket_bytes([600, 600, 600, 600], cap=1000, first=500)
    [600, 1200, 600]
    """
    buckets = [0]
    limit = first
    for nbytes in sizes:
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = cap
        buckets[-1] += nbytes
    return buckets


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that get gradients, detached, by name."""
    return {own_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def probe_bytes(model: nn.Module) -> int:
    """Size of the largest message for `probe`: all gradients of `model`, but 256 KiB to 32 MiB.

    >>> probe_bytes(nn.Linear(1000, 1000))
    4004000
    """
    return min(max(sum(x.nbytes for x in trainable_parameters(model).values()), 2**18), 2**25)
