"""`Meter`: bytes given to collectives, the bytes they put on the wire, and the time they take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

#: Bytes that a worker sends when each of p workers gives b bytes to a collective, by the ring algorithms.
_WIRE = {
    "all_reduce": lambda b, p: 2 * b * (p - 1) / p,
    "all_gather": lambda b, p: b * (p - 1),
    "all_to_all": lambda b, p: b * (p - 1) / p,
    "broadcast": lambda b, p: b * (p - 1) / p,
}


class Meter:
    """Counts for one worker. Times are those of the host: on a GPU, `Breakdown` times the steps.

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
        self._marks: list[float] = []  # start of the work, begin and end of each exchange
        self._sent_at: float | None = None  # start of an exchange that nobody waits for yet

    def sent(self, kind: str, nbytes: int, size: int, inside: bool = False) -> None:
        """Count a collective of `size` workers, each of which gives it `nbytes`, before it starts."""
        self.messages += 1
        self.collective_bytes[kind] += nbytes
        if inside:
            self.inside_wire_bytes += _WIRE[kind](nbytes, size)
        else:
            self.wire_bytes += _WIRE[kind](nbytes, size)
        if self._sent_at is None:
            self._sent_at = time.perf_counter()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time work on some of a step's gradients. Work that raises is not timed."""
        self._marks = [time.perf_counter()]
        yield
        laps = [b - a for a, b in pairwise([*self._marks, time.perf_counter()])]
        self._seconds["exchange"] += sum(laps[1::2])
        self._seconds["encode"] += sum(laps[:-1:2]) if len(laps) > 1 else laps[0]
        self._seconds["decode"] += laps[-1] if len(laps) > 1 else 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for one collective."""
        self._marks.append(time.perf_counter())
        if self._sent_at is not None:
            self._seconds["hidden"] += self._marks[-1] - self._sent_at
            self._sent_at = None
        yield
        self._marks.append(time.perf_counter())

    def step(self, gradient_bytes: int, size: int) -> None:
        """Count a finished step of `size` workers with gradients of `gradient_bytes` bytes."""
        self.steps += 1
        self.gradient_bytes += gradient_bytes
        self.plain_wire_bytes += _WIRE["all_reduce"](gradient_bytes, size)

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds of encode, exchange, decode and hidden."""
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
