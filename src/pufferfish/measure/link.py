"""`Link`: the connection between the workers of a job, as latency and inverse bandwidth of each collective; `probe` measures it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression.exchange import WIRE, Group, Machine
from ..distributed.workers import Workers
from .breakdown import elapsed, pause, timestamp, trimmed_mean

#: Sequential messages in a collective of p workers, for ring algorithms (broadcast: a tree).
HOPS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "all_to_all": lambda p: p - 1,
    "broadcast": lambda p: math.ceil(math.log2(p)),
}
GOODPUT = 0.949  # fraction of the nominal bandwidth for data: TCP/IP in Ethernet frames of 1500 bytes

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")  # that `probe` measures
_LONGEST = 0.25  # seconds; sizes grow until one collective takes longer
_CONTENTION_SECONDS = 0.15  # of the all-reduce during which computation is timed
#: Short collectives are repeated for about so many seconds, up to the maximum number.
_SECONDS, _MAX_REPEATS = 0.1, 20


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
        measured, costs = {
            "all": (self.size, self.collectives),
            "intra_node": (self.per_node, self.intra_node or self.collectives),
            "inter_node": (self.size // self.per_node, self.inter_node or self.collectives),
        }[scope]
        size = measured if size is None else size
        if size < 2 or not nbytes:
            return 0.0
        if (
            size == measured
            and kind in costs
            and (seconds := interpolate(costs[kind].points, nbytes)) is not None
        ):
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
        return self.bandwidth / 8 / wire_factor("all_reduce", self.size)

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

    def limited_to(self, *, bandwidth: float, latency: float = 0.0) -> Link:
        """Return this link as it would be at a nominal bandwidth (bit/s) with added latency (seconds).

        The software's cost of a message and of a byte were measured here; the slower of software and network counts.

        >>> here = Link(size=2, collectives={"all_reduce": AlphaBeta(alpha=1e-4, beta=1e-9)})
        >>> there = here.limited_to(bandwidth=1e8, latency=1e-3)
        >>> there.latency, round(there.bandwidth / 1e6, 1), there.extrapolated
        (0.0011, 94.9, True)
        """
        nominal = Link.nominal(bandwidth=bandwidth, latency=latency, size=self.size)

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
        return HOPS[kind](size) * self.alpha + wire_factor(kind, size) * nbytes * self.beta

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
        wires = [wire_factor(kind, size) * nbytes for nbytes, _ in times]
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


def wire_factor(kind: str, size: int) -> float:
    """Bytes that a worker sends in a collective of `size` workers for each byte passed to it; in a broadcast, the root.

    >>> wire_factor("all_reduce", 4), wire_factor("broadcast", 4)
    (1.5, 2)
    """
    return HOPS[kind](size) if kind == "broadcast" else WIRE[kind](1, size)


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


def probe(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    largest: int = 32 * 2**20,
    rounds: int = 5,
) -> Link:
    """Measure the link between the workers of a group. Call it on all of them.

    Times all-reduces, all-gathers and all-to-alls of 1 KiB, 4 KiB and so on, until one takes 0.25 s, as the slowest worker
    sees them. If LOCAL_WORLD_SIZE says that several workers share a machine, the workers inside one machine, and one worker
    of each machine, are measured separately as well. On CPUs, also measures how much computation is lost during an
    all-reduce.

    Args:
        group: process group (default: the whole job).
        device: device of the tensors.
        largest: maximum bytes sent in each direction by one collective.
        rounds: minimum number of repetitions; short collectives are repeated more often. Times are trimmed means.

    >>> probe()
    Traceback (most recent call last):
    ValueError: probe: needs at least 2 processes; start them with torchrun
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        raise ValueError("probe: needs at least 2 processes; start them with torchrun")
    workers = Workers(group or dist.group.WORLD, torch.device(device), "probe")
    size = workers.size

    def measure(group: dist.ProcessGroup | None, sends: bool = True) -> dict[str, AlphaBeta]:
        size = dist.get_world_size(group)
        return {
            kind: AlphaBeta.fit(kind, size, _times(kind, group, sends, workers, largest, rounds))
            for kind in COLLECTIVES
        }

    link = Link(size=size, collectives=measure(workers.group))
    if workers.device.type == "cpu":
        link = replace(link, contention=_contention(workers.group, link, largest, rounds))
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    per_node = int(local) if local.isdigit() else 1
    if not 1 < per_node < size or size % per_node:
        return replace(link, per_node=size if per_node == size else 1)
    machine = Machine(group)
    # The groups are not destroyed: torch reuses the name for a later group of the same workers, which would then look
    # for its peers at the addresses of the destroyed one.
    inside, between = measure(machine.inside.group), measure(machine.between.group, machine.leads)
    return replace(link, per_node=per_node, intra_node=inside, inter_node=between)


def _times(
    kind: str,
    group: dist.ProcessGroup | None,
    sends: bool,
    workers: Workers,
    largest: int,
    rounds: int,
) -> list[tuple[int, float]]:
    """Pairs (bytes, seconds), equal on all workers. The groups of the workers that send run at the same time."""
    end = Group(group)
    wire = wire_factor(kind, end.size)
    times: list[tuple[int, float]] = []
    nbytes, last = 1024, 0.0
    while len(times) < 2 or (last <= _LONGEST and nbytes * wire <= 2 * largest):
        buffer = torch.zeros(nbytes // 4, device=workers.device)

        def repeat(n: int, buffer: Tensor = buffer) -> Tensor:
            own = [_time_collective(kind, end, sends, workers.group, buffer) for _ in range(n)]
            return workers.max(torch.tensor(own, dtype=torch.float64))

        last = float(repeat(1))  # opens the connections
        repeats = max(rounds, min(_MAX_REPEATS, int(_SECONDS / last)))
        last = trimmed_mean(repeat(repeats).tolist())
        times.append((nbytes, last))
        nbytes *= 4
    return times


def _time_collective(
    kind: str, end: Group, sends: bool, whole: dist.ProcessGroup | None, buffer: Tensor
) -> float:
    """Seconds of one collective, started by all workers that send at about the same time on an idle network."""
    dist.barrier(whole)
    pause()
    if not sends:
        return 0.0
    start = timestamp(buffer.device)
    if kind == "all_reduce":
        end.sum(buffer)()
    elif kind == "all_gather":
        end.gather(buffer)()
    else:
        end.scatter(list(buffer.tensor_split(end.size)))()
    return elapsed(start, timestamp(buffer.device))


def _contention(group: dist.ProcessGroup | None, link: Link, largest: int, rounds: int) -> float:
    """Seconds of computation lost for each byte on the wire: median over rounds with and without an all-reduce."""
    cost, wire = link.collectives["all_reduce"], wire_factor("all_reduce", link.size)
    nbytes = int(min(largest, _CONTENTION_SECONDS / cost.beta / wire if cost.beta else largest)) // 4 * 4
    buffer, x = torch.zeros(nbytes // 4), torch.ones(128, 128)

    def compute(until: Callable[[int], bool]) -> tuple[int, float]:
        start, n = time.perf_counter(), 0
        while n == 0 or not until(n):
            x @ x
            n += 1
        return n, time.perf_counter() - start

    n, seconds = compute(lambda n: n == 100)
    products = max(100, int(_CONTENTION_SECONDS * n / seconds))
    lost = []
    for _ in range(rounds):
        dist.barrier(group)
        n, idle = compute(lambda n: n == products)
        dist.barrier(group)
        sending = dist.all_reduce(buffer, group=group, async_op=True)
        done, busy = compute(lambda n, sending=sending: bool(sending.is_completed()))  # type: ignore[misc]
        lost.append(max(0.0, busy - done * idle / n))
    mean = torch.tensor(lost, dtype=torch.float64) / link.size
    dist.all_reduce(mean, group=group)
    return float(mean.median()) / (wire * nbytes)
