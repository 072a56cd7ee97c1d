"""`LocalExchange`: the averages of local steps, for the cost model: what is sent, when, and how long workers wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..local.fragments import Schedule
from .dry_run import Traffic
from .link import WIRE_FACTOR

#: Rounds after which the waits of each round are the same.
_ROUNDS = 3


@dataclass(frozen=True)
class LocalExchange:
    """The exchange of one worker in local steps. It is assumed not to slow down the computation at the same time.

    Args:
        schedule: which fragment is sent after which update, and when it is applied.
        fragments: messages and compression time of each.

    >>> half = Traffic(messages=(("all_reduce", 1000),))
    >>> exchange = LocalExchange(Schedule(h=4, fragments=2, delay=1), (half, half))
    >>> exchange.wire_bytes(2), exchange.peak_bytes(2), exchange.waiting(1.0, [3.0, 0.5])
    (500.0, 1000.0, 2.0)
    """

    schedule: Schedule
    fragments: tuple[Traffic, ...]

    def wire_bytes(self, size: int) -> float:
        """Bytes that one of `size` workers sends for an update, on average."""
        return sum(_wire_bytes(fragment, size) for fragment in self.fragments) / self.schedule.h

    def peak_bytes(self, size: int) -> float:
        """Bytes that one of `size` workers sends in the largest exchange: those of the fragments that are sent together."""
        moments: dict[int, float] = {}
        for p, fragment in enumerate(self.fragments):
            when = self.schedule.h * p // self.schedule.fragments
            moments[when] = moments.get(when, 0.0) + _wire_bytes(fragment, size)
        return max(moments.values())

    def waiting(self, compute: float, seconds: Sequence[float]) -> float:
        """Seconds that a worker waits in h updates, once all rounds wait equally long.

        Args:
            compute: seconds of an update.
            seconds: that the exchange of each fragment takes. Exchanges run one after the other.
        """
        schedule, clock, link_free, waited = self.schedule, 0.0, 0.0, 0.0
        landing: dict[int, list[float]] = {}
        for update in range(1, _ROUNDS * schedule.h + 1):
            clock += compute
            for p in schedule.due(update % schedule.h):
                link_free = max(clock, link_free) + seconds[p]
                landing.setdefault(update + schedule.delay, []).append(link_free)
            wait = max(0.0, *landing.pop(update, ()), 0.0, clock) - clock
            clock += wait
            waited += wait if update > (_ROUNDS - 1) * schedule.h else 0.0
        return waited


def _wire_bytes(traffic: Traffic, size: int) -> float:
    return sum(WIRE_FACTOR[kind](size) * nbytes for kind, nbytes in traffic.messages)
