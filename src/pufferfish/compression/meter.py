"""`Meter`: what was handed to collectives, what that makes on the wire, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

#: Bytes a rank sends for b bytes handed to a collective of p ranks, by the ring algorithms.
_WIRE = {
    "all_reduce": lambda b, p: 2 * b * (p - 1) / p,
    "all_gather": lambda b, p: b * (p - 1),
    "all_to_all": lambda b, p: b * (p - 1) / p,
    "reduce_scatter": lambda b, p: b * (p - 1) / p,
}


class Meter:
    """Counts for one worker. Times on a GPU are events on its stream, read when asked for and not before.

    "encode" is all the work up to a step's last exchange, "decode" the work after it. An exchange counts while
    somebody waits for it: what hides behind the backward pass does not. On a GPU it is timed on the device, also
    where the host waits. `wire_bytes` leave the machine as far as the compression knows; what stays inside of
    one, by `levels="node"`, is counted apart.

    >>> meter = Meter()
    >>> meter.count("all_gather", 100, 4)
    >>> meter.messages, meter.handed["all_gather"], meter.wire_bytes
    (1, 100, 300.0)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.steps = 0
        self.messages = 0
        self.gradient_bytes = 0  # what would be handed over uncompressed
        self.plain_wire_bytes = 0.0  # what a ring all-reduce would make of that
        self.handed = dict.fromkeys(_WIRE, 0)
        self.wire_bytes = 0.0
        self.inside_wire_bytes = 0.0
        self._seconds = {"encode": 0.0, "exchange": 0.0, "decode": 0.0, "hidden": 0.0}
        self._marks: list[float | torch.cuda.Event] = []
        self._waiting: list[list[float | torch.cuda.Event]] = []  # marks of finished steps, not yet read
        self._begun: float | torch.cuda.Event | None = (
            None  # since when something is under way that nobody waits for
        )
        self._hidden: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []  # not yet read

    def count(self, kind: str, nbytes: int, size: int, inside: bool = False) -> None:
        """A collective of `size` ranks, all `inside` one machine or not, is handed so many bytes by each."""
        self.messages += 1
        self.handed[kind] += nbytes
        if inside:
            self.inside_wire_bytes += _WIRE[kind](nbytes, size)
        else:
            self.wire_bytes += _WIRE[kind](nbytes, size)

    @contextmanager
    def part(self, device: torch.device) -> Iterator[None]:
        """Around work on one part of a step's gradients; what breaks off is not timed."""
        self._marks = [self._now(device)]
        self._device = device
        yield
        self._marks.append(self._now(device))
        self._waiting.append(self._marks)
        if len(self._waiting) > 100 and _over(self._waiting[0][-1]):
            self._read(self._waiting.pop(0))
        while len(self._hidden) > 100 and _over(self._hidden[0][1]):
            self._seconds["hidden"] += _between(*self._hidden.pop(0))

    def step(self, gradient_bytes: int, size: int) -> None:
        """A step of `size` workers with gradients of so many bytes is over."""
        self.steps += 1
        self.gradient_bytes += gradient_bytes
        self.plain_wire_bytes += _WIRE["all_reduce"](gradient_bytes, size)

    def begin(self) -> None:
        """A collective has begun."""
        if self._begun is None:
            self._begun = self._now(self._device)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around waiting for one collective."""
        self._marks.append(self._now(self._device))
        if self._begun is not None:
            self._hidden.append((self._begun, self._marks[-1]))
            self._begun = None
        yield
        self._marks.append(self._now(self._device))

    @property
    def seconds(self) -> dict[str, float]:
        """Of encode, exchange and decode, in all. Waits for the device."""
        while self._waiting:
            self._read(self._waiting.pop(0))
        while self._hidden:
            self._seconds["hidden"] += _between(*self._hidden.pop(0))
        return dict(self._seconds)

    def as_dict(self) -> dict[str, float]:
        """All of it, flat, for any logger.

        >>> Meter().as_dict()["wire_bytes"]
        0.0
        """
        return {
            "steps": self.steps,
            "messages": self.messages,
            "gradient_bytes": self.gradient_bytes,
            "plain_wire_bytes": self.plain_wire_bytes,
            **{f"{kind}_bytes": nbytes for kind, nbytes in self.handed.items()},
            "wire_bytes": self.wire_bytes,
            "inside_wire_bytes": self.inside_wire_bytes,
            **{f"{what}_seconds": seconds for what, seconds in self.seconds.items()},
        }

    def _now(self, device: torch.device) -> float | torch.cuda.Event:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _read(self, marks: list[float | torch.cuda.Event]) -> None:
        """Start, then the begin and end of every exchange, then the end of all."""
        laps = [_between(a, b) for a, b in pairwise(marks)]
        self._seconds["exchange"] += sum(laps[1::2])
        self._seconds["encode"] += sum(laps[:-1:2]) if len(laps) > 1 else laps[0]
        self._seconds["decode"] += laps[-1] if len(laps) > 1 else 0


def _over(mark: float | torch.cuda.Event) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
    if isinstance(a, float):
        assert isinstance(b, float)
        return b - a
    assert not isinstance(b, float)
    b.synchronize()
    return float(a.elapsed_time(b)) / 1000
