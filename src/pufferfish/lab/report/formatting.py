"""Numbers as text, for tables and figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comparison import Estimate


def format_seconds(value: float) -> str:
    """Seconds in the unit that fits.

    >>> format_seconds(0.0123), format_seconds(2.444), format_seconds(312), format_seconds(7700)
    ('12.3 ms', '2.44 s', '5.2 min', '2.14 h')
    """
    if value == 0:
        return "0 s"
    for unit, size, below in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200)):
        if abs(value) < below:
            return f"{format_number(value / size)} {unit}"
    return f"{format_number(value / 3600)} h"


def format_bytes(value: float) -> str:
    """Bytes in decimal units (1 kB = 1000 B), as network speeds are given.

    >>> format_bytes(44_700_000), format_bytes(512)
    ('44.7 MB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{format_number(value)} {unit}"
        value /= 1000
    return f"{format_number(value)} TB"


def format_number(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits and without trailing zeros.

    >>> format_number(2.4444), format_number(1234.5), format_number(0.59), format_number(0)
    ('2.44', '1,234', '0.59', '0')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def metric_words(name: str) -> str:
    """The name of a metric as it is shown.

    >>> metric_words("bits_per_byte")
    'bits per byte'
    """
    return name.replace("_", " ")


def metric_places(name: str) -> int:
    """Decimal places of a metric.

    >>> metric_places("loss"), metric_places("accuracy")
    (4, 2)
    """
    return 4 if name in ("loss", "bits_per_byte") else 2


def format_score(name: str, value: float) -> str:
    """A metric with its name.

    >>> format_score("bits_per_byte", 1.58912), format_score("accuracy", 93.444)
    ('bits per byte 1.5891', 'accuracy 93.44 %')
    """
    unit = " %" if name == "accuracy" else ""
    return f"{metric_words(name)} {value:.{metric_places(name)}f}{unit}"


def format_estimate(value: Estimate, places: int, sign: bool = False) -> str:
    """
    >>> from pufferfish.lab.report.comparison import Estimate
    >>> format_estimate(Estimate(-0.381, 0.43, 3), 2, sign=True), format_estimate(Estimate(93.444, None, 1), 2)
    ('−0.38 ± 0.43', '93.44')
    """
    text = f"{value.mean:{'+' if sign else ''}.{places}f}".replace("-", "−")
    return text if value.half is None else f"{text} ± {value.half:.{places}f}"


def format_speedup(ratio: float) -> str:
    """A speedup; slowdowns are marked as such.

    >>> format_speedup(2.25), format_speedup(0.8), format_speedup(1.001)
    ('2.25×', '0.80× (slower)', '1.00×')
    """
    if round(ratio, 2) < 1:
        return f"{ratio:.2f}× (slower)"
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"
