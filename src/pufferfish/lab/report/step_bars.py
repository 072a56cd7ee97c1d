"""`step_bars`: the step time of each method as a stacked bar, in HTML."""

from html import escape

from ...measure.breakdown import PARTS
from .bench_folder import NO_EXCHANGE
from .comparison import Comparison
from .formatting import format_seconds
from .tables import step_parts

_LABELS = {"hidden": "exchange hidden behind the backward pass, which adds no time"}


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
    bars = "".join(_bar(name, parts, longest) for name, parts in rows)
    shown = [name for name in (*PARTS, "hidden") if any(parts.get(name) for _, parts in rows)]
    legend = "".join(f'<li><i class="part {name}"></i>{_LABELS.get(name, name)}</li>' for name in shown)
    return f'<ul class="bars">{bars}</ul>' + (f'<ul class="legend">{legend}</ul>' if legend else "")


def _visible(parts: dict[str, float]) -> dict[str, float]:
    """The parts that add up to the step."""
    return {name: parts[name] for name in (*PARTS, "") if parts.get(name, 0.0) > 0}


def _bar(name: str, parts: dict[str, float], longest: float) -> str:
    visible = _visible(parts)
    unknown = " (a bound, not a method)" if name == NO_EXCHANGE else " (parts unknown)"
    note = format_seconds(sum(visible.values())) + ("" if set(parts) & set(PARTS) else unknown)
    pieces = "".join(
        f'<i class="part {part}" style="width:{100 * value / longest:.2f}%" title="{part or "step"}: {format_seconds(value)}"></i>'
        for part, value in visible.items()
    )
    hidden, strip = parts.get("hidden", 0.0), ""
    if hidden > 0:
        end = sum(visible.get(part, 0.0) for part in ("data", "forward", "backward"))
        place = f"margin-left:{100 * max(end - hidden, 0.0) / longest:.2f}%;width:{100 * min(hidden, end) / longest:.2f}%"
        title = f"exchange hidden behind the backward pass: {format_seconds(hidden)}"
        strip = f'<i class="part hidden" style="{place}" title="{title}"></i>'
    return (
        f'<li><div class="names"><span>{escape(name)}</span><b>{note}</b></div>'
        f'<div class="bar-line">{pieces}</div>{strip}</li>'
    )
