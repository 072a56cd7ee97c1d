"""Figures as people read them."""

from __future__ import annotations

import math

from .statistics import Estimate


def seconds(value: float) -> str:
    """With the unit that suits.

    >>> seconds(0.0123), seconds(2.444), seconds(312), seconds(7700)
    ('12.3 ms', '2.44 s', '5.2 min', '2.14 h')
    """
    if value == 0:
        return "0 s"
    for unit, size, below in (
        ("µs", 1e-6, 1e-3),
        ("ms", 1e-3, 1.0),
        ("s", 1.0, 120.0),
        ("min", 60.0, 7200.0),
    ):
        if abs(value) < below:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value / 3600)} h"


def nbytes(value: float) -> str:
    """In powers of ten, as networks count.

    >>> nbytes(44_700_000), nbytes(512)
    ('44.7 MB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{significant(value)} {unit}"
        value /= 1000
    return f"{significant(value)} TB"


def count(value: float) -> str:
    """
    >>> count(11173834)
    '11,173,834'
    """
    return f"{value:,.0f}"


def millions(value: float) -> str:
    """
    >>> millions(555_422_720), millions(1482)
    ('555 M', '0.00148 M')
    """
    return f"{significant(value / 1e6)} M"


def significant(value: float, digits: int = 3) -> str:
    """So many digits that count, and no zeros behind them.

    >>> significant(2.4444), significant(1234.5), significant(0.59), significant(0)
    ('2.44', '1,234', '0.59', '0')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def interval(value: Estimate, places: int, sign: bool = False) -> str:
    """
    >>> interval(Estimate(-0.381, 0.43, 3), 2, sign=True), interval(Estimate(93.444, None, 1), 2)
    ('−0.38 ± 0.43', '93.44')
    """
    text = f"{value.mean:{'+' if sign else ''}.{places}f}".replace("-", "−")
    return text if value.half is None else f"{text} ± {value.half:.{places}f}"


def faster(ratio: float) -> str:
    """A speed-up, or a slowdown that says so.

    >>> faster(2.25), faster(0.8), faster(1.001)
    ('2.25×', '0.80×: slower', '1.00×')
    """
    return (
        f"{ratio:.2f}×: slower"
        if round(ratio, 2) < 1
        else f"{ratio:.2f}×"
        if ratio < 100
        else f"{ratio:.0f}×"
    )
