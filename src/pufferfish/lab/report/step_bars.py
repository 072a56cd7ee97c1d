"""`step_bars`: the step time of each method as a stacked bar, in HTML."""

from ...measure.breakdown import PARTS
from .bench_folder import NO_EXCHANGE
from .comparison import Comparison
from .element import element, text
from .formatting import format_seconds
from .tables import step_parts


def step_bars(comparison: Comparison) -> str | None:
    """A bar for each method, divided into the parts of a step where they are known; None without step times."""
    rows = []
    for method in comparison.methods:
        parts, whole = step_parts(method), list(method.results("seconds_a_step").values())
        if parts or whole:
            rows.append((method.name, parts or {"": sum(whole) / len(whole)}))
    if not rows:
        return None
    longest = max(sum(_visible(parts).values()) for _, parts in rows) or 1.0
    items = [_bar(name, parts, longest) for name, parts in rows]
    shown = [name for name in (*PARTS, "hidden") if any(parts.get(name) for _, parts in rows)]
    legend = [
        element("li", element("i", class_=f"part {name}"), text(_LABELS.get(name, name))) for name in shown
    ]
    return element("ul", *items, class_="bars") + (element("ul", *legend, class_="legend") if legend else "")


_LABELS = {"hidden": "exchange hidden behind the backward pass, which adds no time"}


def _visible(parts: dict[str, float]) -> dict[str, float]:
    """The parts that add up to the step."""
    return {name: parts[name] for name in (*PARTS, "") if parts.get(name, 0.0) > 0}


def _bar(name: str, parts: dict[str, float], longest: float) -> str:
    visible = _visible(parts)
    total = sum(visible.values())
    unknown = " (a bound, not a method)" if name == NO_EXCHANGE else " (parts unknown)"
    note = format_seconds(total) + ("" if set(parts) & set(PARTS) else unknown)
    head = element("div", element("span", text(name)), element("b", text(note)), class_="names")
    pieces = [
        element(
            "i", class_=f"part {part}".strip(), style=f"width:{100 * value / longest:.2f}%",
            title=f"{part or 'step'}: {format_seconds(value)}",
        )
        for part, value in visible.items()
    ]  # fmt: skip
    hidden = parts.get("hidden", 0.0)
    strip = ""
    if hidden > 0:
        end = sum(visible.get(part, 0.0) for part in ("data", "forward", "backward"))
        style = f"margin-left:{100 * max(end - hidden, 0.0) / longest:.2f}%;width:{100 * min(hidden, end) / longest:.2f}%"
        title = f"exchange hidden behind the backward pass: {format_seconds(hidden)}"
        strip = element("i", class_="part hidden", style=style, title=title)
    return element("li", head, element("div", *pieces, class_="bar-line"), strip)
