"""`Shape`: what a link should be, in words such as "1gbit,delay=5ms"."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
#: From here on a CPU that plays all hosts is slower than the link.
_FASTEST_MBIT = 10_000


@dataclass(frozen=True)
class Shape:
    """A host's link: how fast it is, each way, and how long a packet travels from one host to another.

    >>> Shape.parse("2.5gbit, delay=500us")
    Shape(mbit=2500.0, delay_ms=0.5)
    >>> print(Shape(100))
    100mbit
    """

    mbit: float
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.mbit < float("inf"):
            raise ValueError(f"a link of {self.mbit:g} Mbit/s: it needs at least 0.1")
        if not 0 <= self.delay_ms <= 10_000:
            raise ValueError(f"a delay of {self.delay_ms:g} ms: choose one of 0 to 10,000")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read a rate and perhaps a delay, one way."""
        rate, *rest = text.lower().replace(" ", "").split(",")
        mbit = _quantity(rate, _RATES)
        delay = _quantity(rest[0].removeprefix("delay="), _TIMES) if rest else 0.0
        if mbit is None or delay is None or len(rest) > 1 or (rest and not rest[0].startswith("delay=")):
            raise ValueError(f"network {text!r}: write it as 100mbit, 1gbit or 1gbit,delay=5ms")
        return cls(mbit, delay)

    def __str__(self) -> str:
        rate = f"{self.mbit / 1e3:g}gbit" if self.mbit >= 1e3 else f"{self.mbit:g}mbit"
        return f"{rate},delay={self.delay_ms:g}ms" if self.delay_ms else rate

    def check(self) -> None:
        """Raise where such a link can be predicted but not emulated.

        >>> Shape.parse("10gbit").check()
        Traceback (most recent call last):
        ValueError: network 10gbit: predicted, not emulated: one machine cannot play it; ask for less than 10gbit
        """
        if self.mbit >= _FASTEST_MBIT:
            raise ValueError(
                f"network {self}: predicted, not emulated: one machine cannot play it; ask for less than 10gbit"
            )

    @property
    def burst(self) -> int:
        """Bytes that may go out at once: a millisecond's. Fewer lose rate, more let small messages beat the line."""
        return max(16 * 1024, round(self.mbit * 125))


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+\.?\d*)([a-z]+)", text)
    if not match or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]
