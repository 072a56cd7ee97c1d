"""`Meter`: bytes given to collectives, the bytes they put on the wire, and the time they take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

#: Seconds, or an event on a GPU's stream.
Timestamp = float | torch.cuda.Event
#: Bytes that a worker sends when each of p workers gives b bytes to a collective, by the ring algorithms.
_WIRE = {
    "all_reduce": lambda b, p: 2 * b * (p - 1) / p,
    "all_gather": lambda b, p: b * (p - 1),
    "all_to_all": lambda b, p: b * (p - 1) / p,
    "broadcast": lambda b, p: b * (p - 1) / p,
}


class Meter:
    """Counts for one worker. Times on a GPU are events on its stream, read only when asked for.

    "encode" is the work up to a step's last exchange, "decode" the work after it. An exchange counts while the worker waits for
    it: what is hidden behind the backward pass does not. `wire_bytes` leave the machine, as far as the compression
    knows; bytes that stay inside a machine, by `hierarchy="node"`, are counted in `inside_wire_bytes`.

    >>> meter = Meter()
    >>> meter.sent("all_gather", 100, 4)
    >>> meter.messages, meter.collective_bytes["all_gather"], meter.wire_bytes
    (1, 100, 300.0)
    >>> meter.step(800, 4)
    >>> meter
    <Meter: 1 step, 300 bytes sent, 1,200 without compression>
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self.reset()

    def __repr__(self) -> str:
        steps = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        sent, plain = f"{self.wire_bytes:,.0f}", f"{self.plain_wire_bytes:,.0f}"
        return f"<Meter: {steps}, {sent} bytes sent, {plain} without compression>"

    def reset(self) -> None:
        """Start counting from zero."""
        self.steps = 0
        self.messages = 0
        self.gradient_bytes = 0  # size of the gradients, uncompressed
        self.plain_wire_bytes = 0.0  # what a ring all-reduce of them would send
        self.collective_bytes = dict.fromkeys(_WIRE, 0)
        self.wire_bytes = 0.0
        self.inside_wire_bytes = 0.0
        self._seconds = {"encode": 0.0, "exchange": 0.0, "decode": 0.0, "hidden": 0.0}
        self._marks: list[Timestamp] = []
        self._unread: list[list[Timestamp]] = []  # marks of finished work
        self._sent_at: Timestamp | None = None  # start of an exchange that nobody waits for yet
        self._unread_hidden: list[tuple[Timestamp, Timestamp]] = []

    def sent(self, kind: str, nbytes: int, size: int, inside: bool = False) -> None:
        """Count a collective of `size` workers, each of which gives it `nbytes`, before it starts."""
        self.messages += 1
        self.collective_bytes[kind] += nbytes
        if inside:
            self.inside_wire_bytes += _WIRE[kind](nbytes, size)
        else:
            self.wire_bytes += _WIRE[kind](nbytes, size)
        if self._sent_at is None:
            self._sent_at = timestamp(self._device)

    @contextmanager
    def working(self, device: torch.device) -> Iterator[None]:
        """Time work on some of a step's gradients. Work that raises is not timed."""
        self._device = device
        self._marks = [timestamp(self._device)]
        yield
        self._marks.append(timestamp(self._device))
        self._unread.append(self._marks)
        if len(self._unread) > 100 and reached(self._unread[0][-1]):
            self._read(self._unread.pop(0))
        while len(self._unread_hidden) > 100 and reached(self._unread_hidden[0][1]):
            self._seconds["hidden"] += elapsed(*self._unread_hidden.pop(0))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for one collective."""
        self._marks.append(timestamp(self._device))
        if self._sent_at is not None:
            self._unread_hidden.append((self._sent_at, self._marks[-1]))
            self._sent_at = None
        yield
        self._marks.append(timestamp(self._device))

    def step(self, gradient_bytes: int, size: int) -> None:
        """Count a finished step of `size` workers with gradients of `gradient_bytes` bytes."""
        self.steps += 1
        self.gradient_bytes += gradient_bytes
        self.plain_wire_bytes += _WIRE["all_reduce"](gradient_bytes, size)

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds of encode, exchange, decode and hidden. Waits for the device."""
        while self._unread:
            self._read(self._unread.pop(0))
        while self._unread_hidden:
            self._seconds["hidden"] += elapsed(*self._unread_hidden.pop(0))
        return dict(self._seconds)

    def as_dict(self) -> dict[str, float]:
        """All counts and times, flat, for any logger.

        >>> Meter().as_dict()["wire_bytes"]
        0.0
        """
        return {
            "steps": self.steps,
            "messages": self.messages,
            "gradient_bytes": self.gradient_bytes,
            "plain_wire_bytes": self.plain_wire_bytes,
            **{f"{kind}_bytes": nbytes for kind, nbytes in self.collective_bytes.items()},
            "wire_bytes": self.wire_bytes,
            "inside_wire_bytes": self.inside_wire_bytes,
            **{f"{what}_seconds": seconds for what, seconds in self.seconds.items()},
        }

    def _read(self, marks: list[Timestamp]) -> None:
        """Add up laps: the start, then begin and end of every exchange, then the end."""
        laps = [elapsed(a, b) for a, b in pairwise(marks)]
        self._seconds["exchange"] += sum(laps[1::2])
        self._seconds["encode"] += sum(laps[:-1:2]) if len(laps) > 1 else laps[0]
        self._seconds["decode"] += laps[-1] if len(laps) > 1 else 0


def timestamp(device: torch.device) -> Timestamp:
    """Record the current time on `device`; on a GPU, an event on its current stream.

    >>> cpu = torch.device("cpu")
    >>> elapsed(timestamp(cpu), timestamp(cpu)) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reached(stamp: Timestamp) -> bool:
    """Whether the device has reached `stamp`; does not wait."""
    return isinstance(stamp, float) or bool(stamp.query())


def elapsed(start: Timestamp, end: Timestamp) -> float:
    """Seconds from `start` to `end`; waits until the device has reached `end`."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
