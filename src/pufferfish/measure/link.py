"""`Link`: what joins the workers of a job, as latency and bandwidth of each collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

#: Messages one after the other in a collective of p ranks, and bytes that a rank sends in it for each byte handed to
#: it, by the ring algorithms.
HOPS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: p - 1,
    "reduce_scatter": lambda p: p - 1,
    "broadcast": lambda p: math.ceil(math.log2(p)),
}
WIRE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "broadcast": lambda p: math.ceil(math.log2(p)),  # the root's, in a tree
}
#: Of a line's bits, what is left for data: TCP/IP in Ethernet frames of 1500 bytes.
GOODPUT = 0.949


@dataclass(frozen=True, kw_only=True)
class Line:
    """A collective's time: α for each hop and β for each byte on the wire.

    >>> Line(alpha=1e-4, beta=8e-9).seconds("all_reduce", 10**6, 4)
    0.0126
    """

    alpha: float  # seconds
    beta: float  # seconds a byte
    error: float = 0.0  # of the fit: mean relative deviation
    #: What was measured, (bytes, seconds) by size: lines let small messages through faster, and TCP large ones slower.
    points: tuple[tuple[int, float], ...] = ()

    def between_points(self, nbytes: float) -> float | None:
        """Seconds by the measured sizes next to it, among as many workers as were measured; None: it is beyond them.

        >>> Line(alpha=0.0, beta=1.0, points=((100, 0.1), (200, 0.3))).between_points(150)
        0.2
        """
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if x0 <= nbytes <= x1:
                return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        return None

    def seconds(self, kind: str, nbytes: float, size: int) -> float:
        """For `nbytes` handed over by each of `size` workers."""
        return HOPS[kind](size) * self.alpha + WIRE[kind](size) * nbytes * self.beta

    @staticmethod
    def fit(kind: str, size: int, times: Sequence[tuple[int, float]]) -> Line:
        """β by least squares over (bytes, seconds), which large messages decide; then α by the relative deviations,
        which small ones decide. Neither is negative.

        >>> true = Line(alpha=1e-4, beta=8e-9)
        >>> fit = Line.fit("all_gather", 3, [(b, true.seconds("all_gather", b, 3)) for b in (10, 10**4, 10**7)])
        >>> f"{fit.alpha:.1e} {fit.beta:.1e}"
        '1.0e-04 8.0e-09'
        """
        if size < 2 or len(times) < 2:
            raise ValueError(f"Line.fit: {len(times)} sizes among {size} workers; it takes two of each")
        # In plain arithmetic: all ranks get the same bits.
        hops, n = HOPS[kind](size), len(times)
        wires = [WIRE[kind](size) * nbytes for nbytes, _ in times]
        laps = [seconds for _, seconds in times]
        wire, lap = sum(wires) / n, sum(laps) / n
        apart = [x - wire for x in wires]
        beta = max(0.0, _dot(apart, [t - lap for t in laps]) / _dot(apart, apart))
        shares = [hops / t for t in laps]
        left = [1 - beta * x / t for x, t in zip(wires, laps, strict=True)]
        alpha = _dot(shares, left) / _dot(shares, shares)
        if alpha < 0:
            alpha, beta = 0.0, _dot(wires, laps) / _dot(wires, wires)
        error = sum(abs(hops * alpha + beta * x - t) / t for x, t in zip(wires, laps, strict=True)) / n
        least = list(accumulate(reversed(laps), min))  # a smaller message never takes longer
        points = tuple(zip((nbytes for nbytes, _ in times), reversed(least), strict=True))
        return Line(alpha=alpha, beta=beta, error=error, points=points)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the workers. Kinds of collectives → lines; one that is missing is taken for the all-reduce."""

    size: int  # workers it was measured among
    lines: Mapping[str, Line]
    per_node: int = 1  # of them on each machine
    inside: Mapping[str, Line] | None = None  # among those of one machine
    between: Mapping[str, Line] | None = None  # among one worker of each machine, all of them at once
    extrapolated: bool = False  # not measured as it is
    toll: float = 0.0  # seconds of computing that are lost for each byte on the wire while both go on

    def seconds(self, kind: str, nbytes: float, size: int | None = None, level: str = "flat") -> float:
        """Of one collective among all workers, those "inside" one machine, or one of each machine ("between").

        Among as many as were measured, or `size`. Levels that were not measured are taken for the flat one.

        >>> Link.of(bandwidth=1e9, latency=0, size=2).seconds("all_reduce", 10**6)
        0.00843
        """
        sizes = {"flat": self.size, "inside": self.per_node, "between": self.size // self.per_node}
        measured = size is None or size == sizes[level]
        size = sizes[level] if size is None else size
        if size < 2 or not nbytes:
            return 0.0
        lines = {"flat": self.lines, "inside": self.inside, "between": self.between}[level] or self.lines
        found = lines[kind].between_points(nbytes) if measured and kind in lines else None
        return (
            (lines.get(kind) or lines["all_reduce"]).seconds(kind, nbytes, size) if found is None else found
        )

    @property
    def bandwidth(self) -> float:
        """Bits a second that each worker sends in a large all-reduce."""
        return 8 / self.lines["all_reduce"].beta if self.lines["all_reduce"].beta else float("inf")

    @property
    def latency(self) -> float:
        """Seconds of one hop of an all-reduce."""
        return self.lines["all_reduce"].alpha

    @staticmethod
    def of(*, bandwidth: float, latency: float, size: int, goodput: float = GOODPUT) -> Link:
        """One that nobody measured: bits a second of the line, seconds one way.

        >>> round(Link.of(bandwidth=1e9, latency=1e-4, size=4).bandwidth / 1e6)
        949
        """
        if not bandwidth > 0 or latency < 0:
            raise ValueError(
                f"a link of {bandwidth} bit/s and {latency} s: the first must be above 0, the second not below"
            )
        line = Line(alpha=latency, beta=8 / (bandwidth * goodput))
        return Link(size=size, lines={"all_reduce": line}, extrapolated=True)

    def at(self, *, bandwidth: float, latency: float = 0.0, goodput: float = GOODPUT) -> Link:
        """This link as it would be on a line of so many bits a second with so much added latency.

        What the software needs for a message and a byte was measured here; the slower of it and the line counts.

        >>> here = Link(size=2, lines={"all_reduce": Line(alpha=1e-4, beta=1e-9)})
        >>> there = here.at(bandwidth=1e8, latency=1e-3)
        >>> there.latency, round(there.bandwidth / 1e6, 1), there.extrapolated
        (0.0011, 94.9, True)
        """
        line = Link.of(bandwidth=bandwidth, latency=latency, size=self.size, goodput=goodput)

        def slower(lines: Mapping[str, Line], sharing: int) -> dict[str, Line]:
            beta = sharing * line.lines["all_reduce"].beta
            return {
                kind: replace(x, alpha=x.alpha + latency, beta=max(x.beta, beta), points=())
                for kind, x in lines.items()
            }

        between = (
            slower(self.between, self.per_node) if self.between else None
        )  # all of a machine send at once
        return replace(self, lines=slower(self.lines, 1), between=between, extrapolated=True)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        mbit = self.bandwidth / 1e6
        return f"{mbit:{',.0f' if mbit >= 100 else '.3g'}} Mbit/s, {1e3 * self.latency:.3g} ms a message"


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))
