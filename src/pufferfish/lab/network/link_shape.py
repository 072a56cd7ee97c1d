"""`LinkShape`: rate and delay of a link, written as "1gbit,delay=5ms"."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
#: From this rate on, a CPU that runs all hosts is slower than the link.
_MAX_MBIT = 10_000
#: Seconds per message on a good network, beside the delay that a link states.
LATENCY = 5e-5


@dataclass(frozen=True)
class LinkShape:
    """Rate and delay of a host's link.

    >>> LinkShape.parse("2.5gbit, delay=500us")
    LinkShape(mbit=2500.0, delay_ms=0.5)
    >>> print(LinkShape(100))
    100mbit
    """

    mbit: float  # rate in Mbit/s, each way
    delay_ms: float = 0.0  # one-way delay between two hosts in milliseconds

    def __post_init__(self) -> None:
        if not 0.1 <= self.mbit < float("inf"):
            raise ValueError(f"link rate must be at least 0.1 Mbit/s, got {self.mbit:g}")
        if not 0 <= self.delay_ms <= 10_000:
            raise ValueError(f"link delay must be between 0 and 10,000 ms, got {self.delay_ms:g}")

    @classmethod
    def parse(cls, text: str) -> LinkShape:
        """Parse a rate with an optional one-way delay."""
        rate, *rest = text.lower().replace(" ", "").split(",")
        mbit = _parse_quantity(rate, _RATES)
        delay = _parse_quantity(rest[0].removeprefix("delay="), _TIMES) if rest else 0.0
        if mbit is None or delay is None or len(rest) > 1 or (rest and not rest[0].startswith("delay=")):
            raise ValueError(f"invalid network {text!r}: write it as 100mbit, 1gbit or 1gbit,delay=5ms")
        return cls(mbit, delay)

    def __str__(self) -> str:
        rate = f"{self.mbit / 1e3:g}gbit" if self.mbit >= 1e3 else f"{self.mbit:g}mbit"
        return f"{rate},delay={self.delay_ms:g}ms" if self.delay_ms else rate

    def check_emulable(self) -> None:
        """Raise ValueError if the link is too fast to be emulated.

        >>> LinkShape.parse("10gbit").check_emulable()
        Traceback (most recent call last):
        ValueError: network 10gbit can be predicted, but is too fast to be emulated; use less than 10gbit
        """
        if self.mbit >= _MAX_MBIT:
            raise ValueError(
                f"network {self} can be predicted, but is too fast to be emulated; use less than 10gbit"
            )

    @property
    def burst(self) -> int:
        """Bytes that may leave at once: one millisecond's worth. Fewer reduce the rate, more speed up small messages."""
        return max(16 * 1024, round(self.mbit * 125))


def _parse_quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+\.?\d*)([a-z]+)", text)
    if not match or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]
