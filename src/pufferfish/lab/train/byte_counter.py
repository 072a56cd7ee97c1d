"""`ByteCounter`: the bytes that a worker has sent during a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class ByteCounter:
    """Bytes sent in all, since the model's last change, and at most in one update and one round of local steps.

    Args:
        sent: Gives the bytes that this process has sent so far.
        round_updates: Updates in a round of local steps.

    >>> sent = [0]
    >>> counter = ByteCounter(lambda: sent[0], round_updates=2)
    >>> for n in (10, 30, 20):
    ...     with counter.update():
    ...         sent[0] += n
    >>> counter.total, counter.peak, counter.round
    (60.0, 30.0, 50.0)
    """

    def __init__(self, sent: Callable[[], float], round_updates: int = 1) -> None:
        self._sent = sent
        self._earlier = 0.0  # sent before the last restart
        self._change = 0.0  # sent before the model's last change
        self.peak, self.round = 0.0, 0.0  # in one update and in one round, at most, since that change
        self._recent: deque[float] = deque(maxlen=round_updates)  # totals before its updates

    @property
    def total(self) -> float:
        return self._earlier + self._sent()

    @property
    def since_change(self) -> float:
        return self.total - self._change

    @contextmanager
    def update(self) -> Iterator[None]:
        self._recent.append(self.total)
        yield
        now = self.total
        self.peak = max(self.peak, now - self._recent[-1])
        self.round = max(self.round, now - self._recent[0])

    def end_round(self) -> None:
        """Forget the updates of a round that ends early: the next one starts anew."""
        self._recent.clear()

    def model_changed(self) -> None:
        self._change = self.total
        self.peak = self.round = 0.0

    def state(self) -> dict[str, float]:
        """State of the counter for a checkpoint."""
        return {"sent": self.total, "phase_sent": self._change, "peak": self.peak, "round": self.round}

    def load(self, state: Mapping[str, float]) -> None:
        self._earlier, self._change = state.get("sent", 0.0), state.get("phase_sent", 0.0)
        self.peak, self.round = state.get("peak", 0.0), state.get("round", 0.0)
