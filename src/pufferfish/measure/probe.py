"""`probe`: measures the link between the workers of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression.hierarchy import nodes
from ..compression.transport import Group
from ..distributed.workers import Workers
from .clock import between, now, typical, wait
from .link import WIRE, Line, Link

KINDS = ("all_reduce", "all_gather", "all_to_all")
#: Seconds of an all-reduce beside which computing is timed.
_BESIDE = 0.15
#: Laps of one size: more of short ones, until they fill so many seconds, but at most so many.
_SECONDS, _MOST = 0.1, 20


def probe(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    largest: int = 32 * 2**20,
    seconds: float = 0.25,
    rounds: int = 5,
) -> Link:
    """Measure the link between all workers of a group (by default, the whole job). Call it on all of them.

    All-reduces, all-gathers and all-to-alls of 1 KiB, four times that and so on, until one takes longer than `seconds`
    or `largest` bytes are sent in each direction; typical ones of `rounds` or, of short ones, more, of the slowest worker. Where LOCAL_WORLD_SIZE says that several
    workers share a machine, those inside one, and one worker of each, are measured on their own as well. On CPUs, also
    how much computing is lost while an all-reduce goes on beside it.

    >>> probe()
    Traceback (most recent call last):
    ValueError: probe: one process has no link; start two or more with torchrun
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        raise ValueError("probe: one process has no link; start two or more with torchrun")
    device = torch.device(device)

    whole = group or dist.group.WORLD

    def lines(group: dist.ProcessGroup | None) -> dict[str, Line]:
        size = dist.get_world_size(group)
        return {
            kind: Line.fit(kind, size, _times(kind, group, whole, device, largest, seconds, rounds))
            for kind in KINDS
        }

    size = dist.get_world_size(group)
    link = Link(size=size, lines=lines(whole))
    if device.type == "cpu":
        link = replace(link, toll=_toll(whole, link, largest, rounds))
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    per_node = int(local) if local.isdigit() else 1
    if not 1 < per_node < size or size % per_node:
        return replace(link, per_node=size if per_node == size else 1)
    two = nodes(group)
    # The groups stay until the job ends: torch gives later ones of the same ranks the same name, and would look for
    # their peers where those of a destroyed group were.
    levels = [lines(two.inside.group), lines(two.between.group)]
    return replace(link, per_node=per_node, inside=levels[0], between=levels[1])


def _times(
    kind: str,
    group: dist.ProcessGroup | None,
    whole: dist.ProcessGroup | None,
    device: torch.device,
    largest: int,
    limit: float,
    rounds: int,
) -> list[tuple[int, float]]:
    """Bytes and seconds, the same on all ranks. Groups that share a line use it at the same time, as in a step."""
    workers = Workers(whole, device, "probe")
    sends = Group(group)
    wire = WIRE[kind](sends.size)
    found: list[tuple[int, float]] = []
    nbytes, last = 1024, 0.0
    while len(found) < 2 or (last <= limit and nbytes * wire <= 2 * largest):
        buffer = torch.zeros(nbytes // 4, device=device)

        def laps(n: int, buffer: Tensor = buffer) -> Tensor:
            mine = torch.tensor([_lap(kind, sends, whole, buffer) for _ in range(n)], dtype=torch.float64)
            return workers.largest(mine)

        last = float(laps(1))  # connections are made in it
        often = max(rounds, min(_MOST, int(_SECONDS / last)))
        last = typical(laps(often).tolist())
        found.append((nbytes, last))
        nbytes *= 4
    return found


def _lap(kind: str, sends: Group, whole: dist.ProcessGroup | None, buffer: Tensor) -> float:
    """Seconds of one collective, which all begin together as well as a barrier and a short sleep can tell, on a line that has rested."""
    dist.barrier(whole)
    wait()
    start = now(buffer.device)
    if kind == "all_reduce":
        sends._sum([buffer])()
    elif kind == "all_gather":
        sends._gather([buffer])()
    else:
        sends._scatter([list(buffer.tensor_split(sends.size))])()
    return between(start, now(buffer.device))


def _toll(group: Any, link: Link, largest: int, rounds: int) -> float:
    """Seconds of computing that each byte on the wire costs beside it: the median of rounds with and without."""
    line, wire = link.lines["all_reduce"], WIRE["all_reduce"](link.size)
    nbytes = int(min(largest, _BESIDE / line.beta / wire if line.beta else largest)) // 4 * 4
    buffer, x = torch.zeros(nbytes // 4), torch.ones(128, 128)

    def computing(until: Callable[[int], bool]) -> tuple[int, float]:
        start, n = time.perf_counter(), 0
        while n == 0 or not until(n):
            x @ x
            n += 1
        return n, time.perf_counter() - start

    n, seconds = computing(lambda n: n == 100)
    often = max(100, int(_BESIDE * n / seconds))
    lost = []
    for _ in range(rounds):
        dist.barrier(group)
        n, quiet = computing(lambda n: n == often)
        dist.barrier(group)
        sent = dist.all_reduce(buffer, group=group, async_op=True)
        done, loud = computing(lambda n, sent=sent: bool(sent.is_completed()))  # type: ignore[misc]
        lost.append(max(0.0, loud - done * quiet / n))
    each = torch.tensor(lost, dtype=torch.float64) / link.size
    dist.all_reduce(each, group=group)
    return float(each.median()) / (wire * nbytes)
