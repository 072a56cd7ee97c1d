"""`probe`: what the link between the workers of a job gives, as latency and bandwidth of each collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress.levels import nodes
from ..compress.transport import Group
from ..ranks import Workers
from .clock import between, now

#: Messages one after the other in a collective of p ranks, and bytes that a rank sends in it for each byte handed to
#: it, by the ring algorithms.
HOPS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: p - 1,
    "reduce_scatter": lambda p: p - 1,
}
WIRE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
}
KINDS = ("all_reduce", "all_gather", "all_to_all")
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

    def seconds(self, kind: str, nbytes: float, size: int) -> float:
        """For `nbytes` handed over by each of `size` workers."""
        return HOPS[kind](size) * self.alpha + WIRE[kind](size) * nbytes * self.beta

    @staticmethod
    def fit(kind: str, size: int, times: Sequence[tuple[int, float]]) -> Line:
        """Least squares of the relative deviations over (bytes, seconds), with α and β not negative.

        >>> true = Line(alpha=1e-4, beta=8e-9)
        >>> fit = Line.fit("all_gather", 3, [(b, true.seconds("all_gather", b, 3)) for b in (10, 10**4, 10**7)])
        >>> f"{fit.alpha:.1e} {fit.beta:.1e}"
        '1.0e-04 8.0e-09'
        """
        if size < 2 or len(times) < 2:
            raise ValueError(f"Line.fit: {len(times)} sizes among {size} workers; it takes two of each")
        # T = α·a + β·b, divided by T. In plain arithmetic: all ranks get the same bits.
        a = [HOPS[kind](size) / seconds for _, seconds in times]
        b = [WIRE[kind](size) * nbytes / seconds for nbytes, seconds in times]
        aa, ab, bb, a1, b1 = _dot(a, a), _dot(a, b), _dot(b, b), sum(a), sum(b)
        alpha = (a1 * bb - b1 * ab) / (aa * bb - ab * ab)
        beta = (b1 * aa - a1 * ab) / (aa * bb - ab * ab)
        if alpha < 0:  # then the other alone
            alpha, beta = 0.0, b1 / bb
        elif beta < 0:
            alpha, beta = a1 / aa, 0.0
        error = sum(abs(alpha * x + beta * y - 1) for x, y in zip(a, b, strict=True)) / len(times)
        return Line(alpha=alpha, beta=beta, error=error)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the workers. Kinds of collectives → lines; one that is missing is taken for the all-reduce."""

    size: int  # workers it was measured among
    lines: Mapping[str, Line]
    per_node: int = 1  # of them on each machine
    inside: Mapping[str, Line] | None = None  # among those of one machine
    between: Mapping[str, Line] | None = None  # among one worker of each machine, all of them at once
    extrapolated: bool = False  # not measured as it is

    def seconds(self, kind: str, nbytes: float, size: int | None = None, level: str = "flat") -> float:
        """Of one collective among all workers, those "inside" one machine, or one of each machine ("between").

        Among as many as were measured, or `size`. Levels that were not measured are taken for the flat one.

        >>> Link.of(bandwidth=1e9, latency=0, size=2).seconds("all_reduce", 10**6)
        0.00843
        """
        sizes = {"flat": self.size, "inside": self.per_node, "between": self.size // self.per_node}
        size = sizes[level] if size is None else size
        if size < 2 or not nbytes:
            return 0.0
        lines = {"flat": self.lines, "inside": self.inside, "between": self.between}[level] or self.lines
        return (lines.get(kind) or lines["all_reduce"]).seconds(kind, nbytes, size)

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
                kind: replace(x, alpha=x.alpha + latency, beta=max(x.beta, beta)) for kind, x in lines.items()
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


def probe(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    largest: int = 32 * 2**20,
    seconds: float = 0.25,
    rounds: int = 5,
) -> Link:
    """Measure the link between all workers of a group (by default, the whole job). Call it on all of them.

    All-reduces, all-gathers and all-to-alls of 1 KiB, eight times that and so on, until one takes longer than `seconds`
    or `largest` bytes are sent in each direction; medians over `rounds`, of the slowest worker. Where LOCAL_WORLD_SIZE says that several
    workers share a machine, those inside one, and one worker of each, are measured on their own as well.

    >>> probe()
    Traceback (most recent call last):
    ValueError: probe: one process has no link; start two or more with torchrun
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        raise ValueError("probe: one process has no link; start two or more with torchrun")
    device = torch.device(device)

    def lines(group: dist.ProcessGroup | None) -> dict[str, Line]:
        size = dist.get_world_size(group)
        return {
            kind: Line.fit(kind, size, _times(kind, group, device, largest, seconds, rounds))
            for kind in KINDS
        }

    whole = group or dist.group.WORLD
    size = dist.get_world_size(group)
    link = Link(size=size, lines=lines(whole))
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    per_node = int(local) if local.isdigit() else 1
    if not 1 < per_node < size or size % per_node:
        return replace(link, per_node=size if per_node == size else 1)
    two = nodes(group)
    levels = [lines(two.inside.group), lines(two.between.group)]
    for made in (two.inside.group, two.between.group):
        dist.destroy_process_group(made)
    return replace(link, per_node=per_node, inside=levels[0], between=levels[1])


def _times(
    kind: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    largest: int,
    limit: float,
    rounds: int,
) -> list[tuple[int, float]]:
    """Bytes and seconds, the same on all ranks."""
    workers = Workers(group, device, "probe")
    sends = Group(group)
    wire = WIRE[kind](sends.size)
    found: list[tuple[int, float]] = []
    nbytes, last = 1024, 0.0
    while len(found) < 2 or (last <= limit and nbytes * wire <= 2 * largest):
        buffer = torch.zeros(nbytes // 4, device=device)

        def laps(n: int, buffer: Tensor = buffer) -> Tensor:
            mine = torch.tensor([_lap(kind, sends, buffer) for _ in range(n)], dtype=torch.float64)
            return workers.largest(mine)

        last = float(laps(1))  # connections are made in it
        last = float(laps(rounds if last < limit / 4 else 2).median())
        found.append((nbytes, last))
        nbytes *= 8
    return found


def _lap(kind: str, sends: Group, buffer: Tensor) -> float:
    """Seconds of one collective, which all begin together as well as a barrier can tell."""
    dist.barrier(sends.group)
    start = now(buffer.device)
    if kind == "all_reduce":
        sends._sum([buffer])()
    elif kind == "all_gather":
        sends._gather([buffer])()
    else:
        sends._scatter([list(buffer.tensor_split(sends.size))])()
    return between(start, now(buffer.device))


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))
