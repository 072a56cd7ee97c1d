"""`CostModel`: how long a step takes, from what it computes, what it sends and the link it sends over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .link import WIRE, Link

MIB = 2**20
#: Share of its speed that computing keeps, whatever is sent.
_LEAST = 0.1


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of one worker without waiting for anybody: seconds of computing, and messages."""

    forward: float
    backward: float
    optimizer: float = 0.0
    data: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    messages: tuple[tuple[str, int], ...] = ()  # kind of collective and bytes handed to it, in their order
    overlaps: bool = False  # whether a message leaves as soon as its gradients are there
    #: Bytes of gradients that are handed over together (DDP's buckets), in their order; (): a message when it is complete.
    handed: tuple[int, ...] = ()
    gathers: tuple[
        tuple[str, int], ...
    ] = ()  # messages that forward needs one after the other (sharded weights)
    buffers: int = 0  # bytes that DDP broadcasts before forward
    #: Bytes of gradients that are averaged inside each machine first (`levels="node"`); the messages then go between.
    inside: int = 0
    #: (share of the gradients' bytes, share of backward after which they are there), from (0, 0) to (1, 1).
    ready: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))

    def accumulated(self, batches: int) -> Work:
        """The same for several batches, of which only the last is followed by an exchange.

        >>> Work(forward=1.0, backward=2.0).accumulated(3)
        Work(forward=7.0, backward=2.0, ...)
        """
        forward = batches * self.forward + (batches - 1) * self.backward
        return dataclasses.replace(self, forward=forward, data=batches * self.data)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step and of its parts, as `Breakdown` has them."""

    data: float
    forward: float
    backward: float
    encode: float
    exchange: float  # while somebody waits for it
    decode: float
    optimizer: float
    hidden: float  # exchange behind backward: not a part of the step
    extrapolated: bool  # to other workers, or another link, than were measured

    @property
    def step(self) -> float:
        """All parts together."""
        parts = (
            self.data,
            self.forward,
            self.backward,
            self.encode,
            self.exchange,
            self.decode,
            self.optimizer,
        )
        return sum(parts)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """α–β for each collective, and overlap with backward.

    Without overlap a step computes, encodes, waits for all messages and decodes. With it the messages queue up for the
    link, each once its gradients are there, and the step waits for what is left after backward. While a message is under
    way computing is slower, by the link's `toll` in seconds for each byte on the wire: sending takes its share of a CPU's cores.

    >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> model = CostModel(link=Link.of(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> model.predict(work).step, model.predict(work, workers=4).step
    (0.38, 0.42)
    """

    link: Link

    def predict(self, work: Work, workers: int | None = None) -> Prediction:
        """What a step takes, among as many workers as the link was measured with, or another number."""
        size = self.link.size if workers is None else workers
        times = self._times(work, size)
        backward, exchange, hidden = work.backward, sum(times), 0.0
        if work.overlaps and times and not work.inside:
            end, computed = self._overlapped(work, times, size)
            backward, exchange = computed - work.encode, end - computed
            hidden = sum(times) - min(exchange, sum(times))
        if work.buffers:
            exchange += self.link.seconds("broadcast", work.buffers, size)
        if work.gathers:
            waits = [self.link.seconds(kind, nbytes, size) for kind, nbytes in work.gathers]
            shown = max(waits[0], sum(waits) - work.forward * (1 - 1 / len(waits)))
            exchange, hidden = exchange + shown, hidden + sum(waits) - shown
        return Prediction(
            data=work.data,
            forward=work.forward,
            backward=backward,
            encode=work.encode,
            exchange=exchange,
            decode=work.decode,
            optimizer=work.optimizer,
            hidden=hidden,
            extrapolated=self.link.extrapolated or size != self.link.size,
        )

    def _overlapped(self, work: Work, times: Sequence[float], size: int) -> tuple[float, float]:
        """Seconds from the begin of backward to the end of the last message, and to the end of computing."""
        computing = work.backward + work.encode
        total = sum(nbytes for _, nbytes in work.messages)
        edges = list(accumulate(work.handed)) or [0]
        clock = done = 0.0  # done: of computing
        computed = None  # when that was all
        gone = 0
        for (kind, nbytes), seconds in zip(work.messages, times, strict=True):
            gone += nbytes
            share = gone / total
            if work.handed:
                share = next((x for x in edges if x >= share * edges[-1] * (1 - 1e-9)), edges[-1]) / edges[-1]
            due = computing * _at(work.ready, share)
            if done < due:
                clock, done = clock + due - done, due
            pace = max(_LEAST, 1 - self.link.toll * WIRE[kind](size) * nbytes / seconds) if seconds else 1.0
            if done + pace * seconds >= computing and computed is None:
                computed = clock + (computing - done) / pace
            clock, done = clock + seconds, min(computing, done + pace * seconds)
        computed = clock + computing - done if computed is None else computed
        return max(clock, computed), computed

    def _times(self, work: Work, size: int) -> list[float]:
        """Of all messages."""
        link = self.link
        if not work.inside:
            return [link.seconds(kind, nbytes, size) for kind, nbytes in work.messages]
        machines = size // link.per_node
        return [
            link.seconds("reduce_scatter", work.inside, level="inside"),
            link.seconds("all_gather", work.inside / link.per_node, level="inside"),
            *(link.seconds(kind, nbytes, machines, "between") for kind, nbytes in work.messages),
        ]

    def undisturbed(self, work: Work) -> Work:
        """`work`, whose backward was measured beside its messages, as it would be without them.

        >>> link = Link.of(bandwidth=1e9, latency=0, size=2)
        >>> model = CostModel(link=dataclasses.replace(link, toll=2e-9))
        >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),) * 2, overlaps=True)
        >>> seen = dataclasses.replace(work, backward=model.predict(work).backward)
        >>> seen.backward > 0.2, round(model.undisturbed(seen).backward, 6)
        (True, 0.2)
        """
        low, high = 0.0, work.backward
        for _ in range(40):
            middle = (low + high) / 2
            slower = self.predict(dataclasses.replace(work, backward=middle)).backward > work.backward
            low, high = (low, middle) if slower else (middle, high)
        return dataclasses.replace(work, backward=high)


def buckets(sizes: Iterable[int], cap: float = 25 * MIB, first: float = MIB) -> list[int]:
    """Bytes of the messages that plain DDP makes of gradients of so many bytes, in the order they come.

    >>> buckets([600, 600, 600, 600], cap=1000, first=500)
    [600, 1200, 600]
    """
    found = [0]
    limit = first
    for nbytes in sizes:
        if found[-1] >= limit:
            found.append(0)
            limit = cap
        found[-1] += nbytes
    return found


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Between the curve's points, straight lines."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return curve[-1][1]
