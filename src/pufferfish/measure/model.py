"""`CostModel`: how long a step takes, from what it computes, what it sends and the link it sends over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .link import WIRE, Link

MIB = 2**20


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
    link, each once its gradients are there, and the step waits for what is left after backward. While they overlap,
    sending slows computing down: by `toll` seconds for each byte on the wire (0: it does not; it shares a CPU's cores).

    >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> model = CostModel(link=Link.of(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> model.predict(work).step, model.predict(work, workers=4).step
    (0.38, 0.42)
    """

    link: Link
    toll: float = 0.0
    error: float | None = None  # mean relative deviation from the measurements it was fitted to

    def predict(self, work: Work, workers: int | None = None) -> Prediction:
        """What a step takes, among as many workers as the link was measured with, or another number."""
        size = self.link.size if workers is None else workers
        times = self._times(work, size)
        backward, exchange, hidden = work.backward, sum(times), 0.0
        if work.overlaps and times and not work.inside:
            backward += self.toll * sum(WIRE[kind](size) * nbytes for kind, nbytes in work.messages)
            computing = backward + work.encode
            end = gone = 0.0
            total = sum(nbytes for _, nbytes in work.messages)
            for (_, nbytes), seconds in zip(work.messages, times, strict=True):
                gone += nbytes
                end = max(end, computing * _at(work.ready, gone / total)) + seconds
            exchange = max(0.0, end - computing)
            hidden = sum(times) - min(exchange, sum(times))
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

    @staticmethod
    def fit(link: Link, measured: Sequence[tuple[Work, float]]) -> CostModel:
        """The toll that explains measured steps best (least squares of the relative deviations), and the error left.

        >>> link = Link.of(bandwidth=1e9, latency=0, size=2)
        >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),), overlaps=True)
        >>> true = CostModel(link=link, toll=5e-9)
        >>> CostModel.fit(link, [(work, true.predict(work).step)]).toll
        5e-09
        """
        if not measured:
            raise ValueError("CostModel.fit: no step was measured")
        wires = [
            (sum(WIRE[kind](link.size) * nbytes for kind, nbytes in work.messages), seconds)
            for work, seconds in measured
        ]
        low, high = 0.0, max((seconds / wire for wire, seconds in wires if wire), default=0.0)
        for _ in range(20):  # each time on a tenth of the range
            step = (high - low) / 20
            tolls = [low + i * step for i in range(21)]
            best = min(tolls, key=lambda toll: CostModel(link=link, toll=toll)._squares(measured))
            low, high = max(0.0, best - step), best + step
        model = CostModel(link=link, toll=best)
        return dataclasses.replace(model, error=sum(map(abs, model.errors(measured))) / len(measured))

    def errors(self, measured: Sequence[tuple[Work, float]]) -> list[float]:
        """Of each measured step, the predicted over the measured, less one."""
        return [self.predict(work).step / seconds - 1 for work, seconds in measured]

    def _squares(self, measured: Sequence[tuple[Work, float]]) -> float:
        return sum(error * error for error in self.errors(measured))


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
