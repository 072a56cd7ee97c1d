"""SVG: elements, scales with round ticks, and marks that differ in shape and in colour."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 7  # CSS classes c0 … c6 in style.py
_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-4.8L4.6 3.4H-4.6z", "M0-5L5 0 0 5-5 0z",
    "M0 4.8L4.6-3.4H-4.6z", "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z", "M-4.6-2.4L0-5 4.6-2.4 2.9 4h-5.8z",
)  # fmt: skip


def element(tag: str, *inside: str, **attributes: object) -> str:
    """An XML element. The attributes `class_` and `font_size` become class and font-size.

    >>> element("text", text("R&D"), x=3.14159, class_="tick")
    '<text x="3.1" class="tick">R&amp;D</text>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{written}/>"


def text(value: str) -> str:
    """Escape text."""
    return escape(value, quote=False)


def label(value: str, kind: str, x: float, y: float, anchor: str | None = None) -> str:
    """A text of the CSS class `kind`; `anchor` is "middle", "end" or None for the start."""
    return element("text", text(value), class_=kind, x=x, y=y, text_anchor=anchor)


def drawing(title: str, description: str, width: float, height: float, *inside: str) -> str:
    """A complete figure, with title and description for screen readers."""
    head = element("title", text(title)) + element("desc", text(description))
    return element("svg", head, *inside, viewBox=f"0 0 {_short(width)} {_short(height)}", role="img")


def clipped(x: float, y: float, width: float, height: float, *inside: str) -> str:
    """Clip the content to a rectangle."""
    box = " ".join(map(_short, (x, y, width, height)))
    return element("svg", *inside, x=x, y=y, width=width, height=height, viewBox=box)


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between low and high.

        >>> Scale(0, 10, 0, 1).ticks(), Scale(0.3, 40, 0, 1, log=True).ticks(3)
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 10.0])
        """
        if not self.log:
            span = self.high - self.low
            base = 10.0 ** math.floor(math.log10(span / most))
            step = next(s for s in (base, 2 * base, 5 * base, 10 * base, 20 * base) if span / s <= most)
            first = math.ceil(self.low / step - 1e-9)
            return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
            values = [s * 10.0**n for n in decades for s in steps]
            ticks = [v for v in values if self.low <= v * (1 + 1e-9) <= self.high * (1 + 2e-9)]
            if len(ticks) <= most:
                return ticks
        return ticks[:: math.ceil(len(ticks) / most)]


def padded_range(values: Sequence[float], log: bool = False, room: float = 0.05) -> tuple[float, float]:
    """A range of nonzero width with all values, extended by the fraction `room` on each side.

    >>> padded_range([0, 10]), padded_range([3, 3])
    ((-0.5, 10.5), (2.85, 3.15))
    """
    low, high = min(values), max(values)
    if log:
        factor = max((high / low) ** room, 1.1)
        return low / factor, high * factor
    extra = (high - low) * room or abs(high) * 0.05 or 1.0
    return low - extra, high + extra


def axes(
    x: Scale, y: Scale, labels: tuple[str, str], show: tuple[Callable[[float], str], Callable[[float], str]]
) -> str:
    """Grid lines, ticks and axis labels."""
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(element("path", class_="grid", d=f"M{x.start:.1f} {at:.1f}H{x.end:.1f}"))
        parts.append(label(show[1](value), "tick", x.start - 6, at + 4, "end"))
    for value in x.ticks(5):
        at = x(value)
        parts.append(element("path", class_="grid", d=f"M{at:.1f} {y.start:.1f}v4"))
        parts.append(label(show[0](value), "tick", at, y.start + 17, "middle"))
    parts.append(element("path", class_="axis", d=f"M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"))
    parts.append(label(labels[1], "name", 0, y.end - 10))
    parts.append(label(labels[0], "name", (x.start + x.end) / 2, y.start + 35, "middle"))
    return "".join(parts)


def path(points: Sequence[tuple[float, float]]) -> str:
    """The `d` attribute of a polyline.

    >>> path([(0, 0), (1.25, 2)])
    'M0 0L1.2 2'
    """
    return "M" + "L".join(f"{_short(a)} {_short(b)}" for a, b in points)


def mark(index: int, x: float, y: float, tooltip: str = "") -> str:
    """The mark of method number `index`."""
    inside = (element("title", text(tooltip)),) if tooltip else ()
    cycle = index // COLOURS  # colours repeat with another shape
    shape, place = _SHAPES[(index + cycle) % len(_SHAPES)], f"translate({_short(x)} {_short(y)})"
    return element("path", *inside, class_=f"mark c{index % COLOURS}", d=shape, transform=place)


def swatch(index: int) -> str:
    """The mark of a method, for legends."""
    return element("svg", mark(index, 8, 8), viewBox="0 0 16 16", aria_hidden="true", class_="swatch")


def separate(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart, as little as possible, so that labels do not overlap.

    >>> separate([10, 11, 40], 10, 0, 100)
    [5.5, 15.5, 40.0]
    """
    blocks: list[list[int]] = []  # labels at distance `gap`, centred on the mean of their positions

    def first(block: list[int]) -> float:
        length = gap * (len(block) - 1)
        at = sum(places[i] for i in block) / len(block) - length / 2
        return max(min(at, high - length), low)

    for i in sorted(range(len(places)), key=lambda i: places[i]):
        block = [i]
        while blocks and first(blocks[-1]) + gap * len(blocks[-1]) > first(block):
            block = blocks.pop() + block
        blocks.append(block)
    moved = {i: first(block) + n * gap for block in blocks for n, i in enumerate(block)}
    return [moved[i] for i in range(len(places))]


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
