"""`Link`: the connection between the workers of a job, as latency and inverse bandwidth of each collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

#: Sequential messages in a collective of p workers, for ring algorithms (broadcast: a tree).
HOPS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: p - 1,
    "reduce_scatter": lambda p: p - 1,
    "broadcast": lambda p: math.ceil(math.log2(p)),
}
#: Bytes that a worker sends in a collective of p workers for each byte passed to it.
WIRE_FACTOR: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "broadcast": lambda p: math.ceil(math.log2(p)),  # sent by the root
}
GOODPUT = 0.949  # fraction of the nominal bandwidth for data: TCP/IP in Ethernet frames of 1500 bytes


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Cost of a collective: α seconds for each hop and β seconds for each byte on the wire.

    >>> AlphaBeta(alpha=1e-4, beta=8e-9).seconds("all_reduce", 10**6, 4)
    0.0126
    """

    alpha: float  # seconds
    beta: float  # seconds per byte
    #: Measurements (bytes, seconds), by size: real links are faster than the fit for small messages, TCP slower for large ones.
    points: tuple[tuple[int, float], ...] = ()

    def seconds(self, kind: str, nbytes: float, size: int) -> float:
        """Seconds of a collective to which each of `size` workers passes `nbytes` bytes."""
        return HOPS[kind](size) * self.alpha + WIRE_FACTOR[kind](size) * nbytes * self.beta

    @staticmethod
    def fit(kind: str, size: int, times: Sequence[tuple[int, float]]) -> AlphaBeta:
        """Fit α and β to `times`, at least two pairs (bytes, seconds). Neither is negative.

        β is the least-squares fit, dominated by large messages; α then minimizes the relative deviations, dominated by
        small ones.

        >>> true = AlphaBeta(alpha=1e-4, beta=8e-9)
        >>> times = [(b, true.seconds("all_gather", b, 3)) for b in (10, 10**4, 10**7)]
        >>> fit = AlphaBeta.fit("all_gather", 3, times)
        >>> f"{fit.alpha:.1e} {fit.beta:.1e}"
        '1.0e-04 8.0e-09'
        """
        # Plain Python arithmetic, so that all workers compute bit-identical results.
        hops, n = HOPS[kind](size), len(times)
        wires = [WIRE_FACTOR[kind](size) * nbytes for nbytes, _ in times]
        seconds = [t for _, t in times]
        mean_wire, mean_seconds = sum(wires) / n, sum(seconds) / n
        centered = [x - mean_wire for x in wires]
        beta = max(0.0, _dot(centered, [t - mean_seconds for t in seconds]) / _dot(centered, centered))
        shares = [hops / t for t in seconds]
        left = [1 - beta * x / t for x, t in zip(wires, seconds, strict=True)]
        alpha = _dot(shares, left) / _dot(shares, shares)
        if alpha < 0:
            alpha, beta = 0.0, _dot(wires, seconds) / _dot(wires, wires)
        monotone = list(accumulate(reversed(seconds), min))  # a smaller message never takes longer
        points = tuple(zip((nbytes for nbytes, _ in times), reversed(monotone), strict=True))
        return AlphaBeta(alpha=alpha, beta=beta, points=points)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection between workers. A collective that is missing from a mapping is predicted from the all-reduce."""

    size: int  # number of workers it was measured with
    collectives: Mapping[str, AlphaBeta]  # among all workers, by collective
    per_node: int = 1  # workers on each machine
    intra_node: Mapping[str, AlphaBeta] | None = None  # among the workers of one machine
    inter_node: Mapping[str, AlphaBeta] | None = None  # among one worker of each machine
    extrapolated: bool = False  # whether it differs from a measured link
    contention: float = 0.0  # seconds of computation lost for each byte on the wire while both run

    def seconds(self, kind: str, nbytes: float, size: int | None = None, scope: str = "all") -> float:
        """Seconds of a collective, such as "all_reduce", to which each worker passes `nbytes` bytes.

        Args:
            size: number of workers (default: as many as were measured).
            scope: "all" workers, those of one machine ("intra_node"), or one worker per machine ("inter_node"). A
                scope that was not measured is taken to be like "all".

        >>> Link.nominal(bandwidth=1e9, latency=0, size=2).seconds("all_reduce", 10**6)
        0.00843
        """
        sizes = {"all": self.size, "intra_node": self.per_node, "inter_node": self.size // self.per_node}
        measured = size is None or size == sizes[scope]
        size = sizes[scope] if size is None else size
        if size < 2 or not nbytes:
            return 0.0
        scopes = {"all": self.collectives, "intra_node": self.intra_node, "inter_node": self.inter_node}
        costs = scopes[scope] or self.collectives
        if measured and kind in costs and (seconds := interpolate(costs[kind].points, nbytes)) is not None:
            return seconds
        return (costs.get(kind) or costs["all_reduce"]).seconds(kind, nbytes, size)

    @property
    def bandwidth(self) -> float:
        """Bits per second that each worker sends in a large all-reduce."""
        beta = self.collectives["all_reduce"].beta
        return 8 / beta if beta else float("inf")

    @property
    def all_reduce_rate(self) -> float:
        """Bytes of gradients per second that a large all-reduce averages; the `link` of `pufferfish.plan`.

        >>> Link.nominal(bandwidth=8e9, latency=0, size=4, goodput=1).all_reduce_rate / 1e6
        666.7
        """
        return self.bandwidth / 8 / WIRE_FACTOR["all_reduce"](self.size)

    @property
    def latency(self) -> float:
        """Seconds of one hop of an all-reduce."""
        return self.collectives["all_reduce"].alpha

    @staticmethod
    def nominal(*, bandwidth: float, latency: float, size: int, goodput: float = GOODPUT) -> Link:
        """Return a link that was not measured, from its nominal bandwidth (bit/s) and one-way latency (seconds).

        >>> round(Link.nominal(bandwidth=1e9, latency=1e-4, size=4).bandwidth / 1e6)
        949
        """
        if not bandwidth > 0 or latency < 0:
            raise ValueError(
                f"Link: bandwidth={bandwidth} bit/s must be above 0 and latency={latency} s must not be negative"
            )
        cost = AlphaBeta(alpha=latency, beta=8 / (bandwidth * goodput))
        return Link(size=size, collectives={"all_reduce": cost}, extrapolated=True)

    def limited_to(self, *, bandwidth: float, latency: float = 0.0, goodput: float = GOODPUT) -> Link:
        """Return this link as it would be at a nominal bandwidth (bit/s) with added latency (seconds).

        The software's cost of a message and of a byte were measured here; the slower of software and network counts.

        >>> here = Link(size=2, collectives={"all_reduce": AlphaBeta(alpha=1e-4, beta=1e-9)})
        >>> there = here.limited_to(bandwidth=1e8, latency=1e-3)
        >>> there.latency, round(there.bandwidth / 1e6, 1), there.extrapolated
        (0.0011, 94.9, True)
        """
        nominal = Link.nominal(bandwidth=bandwidth, latency=latency, size=self.size, goodput=goodput)

        def slower(costs: Mapping[str, AlphaBeta]) -> dict[str, AlphaBeta]:
            beta = nominal.collectives["all_reduce"].beta
            return {
                kind: replace(x, alpha=x.alpha + latency, beta=max(x.beta, beta), points=())
                for kind, x in costs.items()
            }

        inter_node = slower(self.inter_node) if self.inter_node else None
        return replace(self, collectives=slower(self.collectives), inter_node=inter_node, extrapolated=True)

    def __str__(self) -> str:
        """
        >>> str(Link.nominal(bandwidth=1e9, latency=1e-4, size=4, goodput=1))
        '1,000 Mbit/s, 0.1 ms per message'
        >>> str(Link.nominal(bandwidth=math.inf, latency=1e-4, size=4))
        'too fast to measure, 0.1 ms per message'
        """
        mbit = self.bandwidth / 1e6
        rate = (
            f"{mbit:{',.0f' if mbit >= 100 else '.3g'}} Mbit/s" if mbit < math.inf else "too fast to measure"
        )
        return f"{rate}, {1e3 * self.latency:.3g} ms per message"


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Piecewise linear interpolation between `points`, in the order of x; None outside their range.

    >>> interpolate(((100, 0.1), (200, 0.3)), 150)
    0.2
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return None


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))
