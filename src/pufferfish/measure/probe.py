"""`probe`: measures the link between the workers of a job, with real collectives."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression.exchange import Group, Machine
from ..distributed.workers import Workers
from .clock import elapsed, pause, timestamp, trimmed_mean
from .link import WIRE_FACTOR, AlphaBeta, Link

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
_CONTENTION_SECONDS = 0.15  # of the all-reduce during which computation is timed
#: Short collectives are repeated for about so many seconds, up to the maximum number.
_SECONDS, _MAX_REPEATS = 0.1, 20


def probe(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    largest: int = 32 * 2**20,
    seconds: float = 0.25,
    rounds: int = 5,
) -> Link:
    """Measure the link between the workers of a group. Call it on all of them.

    Times all-reduces, all-gathers and all-to-alls of 1 KiB, 4 KiB and so on, as the slowest worker sees them. If
    LOCAL_WORLD_SIZE says that several workers share a machine, the workers inside one machine, and one worker of each machine,
    are measured separately as well. On CPUs, also measures how much computation is lost during an all-reduce.

    Args:
        group: process group (default: the whole job).
        device: device of the tensors.
        largest: maximum bytes sent in each direction by one collective.
        seconds: sizes grow until one collective takes longer than this.
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
        times = {kind: _times(kind, group, sends, workers, largest, seconds, rounds) for kind in COLLECTIVES}
        return {kind: AlphaBeta.fit(kind, size, times[kind]) for kind in COLLECTIVES}

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
    scopes = [measure(machine.inside.group), measure(machine.between.group, machine.leads)]
    return replace(link, per_node=per_node, intra_node=scopes[0], inter_node=scopes[1])


def _times(
    kind: str,
    group: dist.ProcessGroup | None,
    sends: bool,
    workers: Workers,
    largest: int,
    limit: float,
    rounds: int,
) -> list[tuple[int, float]]:
    """Pairs (bytes, seconds), equal on all workers. The groups of the workers that send run at the same time."""
    end = Group(group)
    wire = WIRE_FACTOR[kind](end.size)
    times: list[tuple[int, float]] = []
    nbytes, last = 1024, 0.0
    while len(times) < 2 or (last <= limit and nbytes * wire <= 2 * largest):
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
        done: Callable[[], object] = end._sum(buffer)[0]
    elif kind == "all_gather":
        done = end._gather(buffer)[0]
    else:
        done = end._scatter(list(buffer.tensor_split(end.size)))[0]
    done()
    return elapsed(start, timestamp(buffer.device))


def _contention(group: Any, link: Link, largest: int, rounds: int) -> float:
    """Seconds of computation lost for each byte on the wire: median over rounds with and without an all-reduce."""
    cost, wire = link.collectives["all_reduce"], WIRE_FACTOR["all_reduce"](link.size)
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
