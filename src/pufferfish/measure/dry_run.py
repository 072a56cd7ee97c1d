"""`dry_run`: what one worker of many sends in a step of a compression method, and how long it computes, without a network."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compression.aggregator import Aggregator
from ..compression.hierarchy import Nodes
from ..compression.meter import Meter
from ..compression.settings import Methods
from ..compression.transport import Coming, Transport
from .clock import typical, wait

#: Steps fill so many seconds, and are at least and at most so many.
_SECONDS, _LEAST, _MOST = 0.1, 3, 20


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One step of one worker."""

    messages: tuple[tuple[str, int], ...]  # kind of collective and bytes handed to it, in their order
    encode: float = 0.0  # seconds, up to the last message
    decode: float = 0.0  # and after it
    overlaps: bool = False  # whether messages leave while the backward pass goes on
    inside: int = 0  # bytes that are averaged inside each machine first

    @property
    def nbytes(self) -> int:
        """Handed to collectives in all."""
        return sum(nbytes for _, nbytes in self.messages)


def dry_run(
    method: Methods,
    like: Mapping[str, Tensor],
    size: int,
    *,
    device: torch.device | str | None = None,
    steps: int | None = None,
    per_node: int = 1,
) -> Sent:
    """A method on random gradients of the shapes and dtypes of `like`, as if there were `size` workers.

    All of them send what we send, so that the work on what arrives is done too. Random numbers are our own. Times
    are typical ones of `steps` after a first (None: of three, or more where they are short); the messages are those of the last of
    these, or of the third: whatever the clock says, all ranks find the same. With `per_node` workers a machine it is `levels="node"`,
    and the messages are those between machines.

    >>> from pufferfish.compression import BFloat16
    >>> sent = dry_run(BFloat16(), {"w": torch.empty(64, 64)}, 4, steps=1)
    >>> sent.messages[0], sent.overlaps
    (('all_reduce', 8192), True)
    """
    here = torch.device(device) if device is not None else next(iter(like.values())).device
    generator = torch.Generator(here).manual_seed(0)
    gradients = {
        name: torch.empty(x.shape, dtype=x.dtype, device=here).normal_(generator=generator)
        for name, x in like.items()
    }
    means = {name: torch.empty_like(g) for name, g in gradients.items()}
    worker = OneOf(size // per_node)
    nodes = _OneOfNodes(per_node, worker, gradients) if per_node > 1 else None
    aggregator = Aggregator(method, worker, levels=nodes or "flat")
    laps: dict[str, list[float]] = {"encode": [], "decode": []}
    messages: tuple[tuple[str, int], ...] = ()
    last = counted = steps or _LEAST
    for step in itertools.count():
        worker.sent.clear()
        wait()
        before = worker.meter.seconds
        under_way = aggregator.begin(None if step else gradients)
        under_way.add([gradients])
        under_way.finish([means])
        if step:
            after = worker.meter.seconds
            for name, seen in laps.items():
                seen.append(after[name] - before[name])
        if step == counted:
            messages = tuple(worker.sent)
        if step == 1 and steps is None:
            lap = sum(seen[-1] for seen in laps.values())
            last = max(_LEAST, min(_MOST, int(_SECONDS / lap) if lap else _MOST))
        if step == last:
            break
    return Sent(
        messages=messages,
        encode=typical(laps["encode"]),
        decode=typical(laps["decode"]),
        overlaps=aggregator.overlap_bytes is not None,
        inside=sum(nodes.handed.values()) if nodes else 0,
    )


class OneOf(Transport):
    """Worker 0 of `size`: the bytes and the work of a real job's worker.

    All send what it sends. Sums are left as they are: what they come to is no matter here, and would take time.

    >>> OneOf(8).size
    8
    """

    def __init__(self, size: int, meter: Meter | None = None) -> None:
        super().__init__(meter)
        self.size, self.ranks = size, (0,)
        self.sent: list[tuple[str, int]] = []

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        self.sent.append(("all_reduce", mine[0].nbytes))
        return lambda: mine

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        self.sent.append(("all_gather", mine[0].nbytes))
        return lambda: [mine * self.size]

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        self.sent.append(("all_to_all", sum(piece.nbytes for piece in mine[0])))
        return lambda: [[mine[0][0]] * self.size]


class _OneOfNodes(Nodes):
    """The worker of a machine that owns most: all its copies, without its neighbours."""

    def __init__(self, size: int, between: OneOf, like: Mapping[str, Tensor]) -> None:
        self.inside: Any = OneOf(size, between.meter)
        self.between: Any = between
        self.size = size
        self.handed: dict[torch.dtype, int] = {}  # bytes
        shares = [sum(like[n].nbytes for n in names) for names in self.owners(like)]
        self.rank = shares.index(max(shares))

    def _own_row(self, flat: Tensor) -> Tensor:
        self.handed[flat.dtype] = flat.nbytes
        return flat[self.rank].clone()
