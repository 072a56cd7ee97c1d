"""How a plan prints: its tables and remarks (`plan_parts`, `obstacles`); the plain `Table`; the progress of long loops.

Loops report their progress by `track` and `progress`, which show nothing unless a program calls `display_progress`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .entries import Entry, Plan, Totals

T = TypeVar("T")
#: Makes a display from a text and the total amount, if known; the display gives a function to add to the amount done.
Display = Callable[[str, float | None], AbstractContextManager[Callable[[float], None]]]
_display: ContextVar[Display | None] = ContextVar("display", default=None)


def plan_parts(plan: Plan, folded: bool = True) -> list[str | Table]:
    """The tables and paragraphs of a printed plan. Reasons are numbered notes.

    Args:
        folded: show repeated blocks in one row, and leave out the type of each layer.
    """
    layers, notes = _layers(plan, folded)
    parts: list[str | Table] = [layers, notes, _totals(plan), _expected(plan), *_remarks(plan)]
    return [part for part in parts if str(part)]


def plan_table(plan: Plan) -> str:
    """Format a plan with one row per layer and all columns."""
    return "\n\n".join(map(str, plan_parts(plan, folded=False)))


def _layers(plan: Plan, folded: bool) -> tuple[Table, str]:
    """The table of all matrices, and the notes to which its last column refers."""
    groups = folded_rows(plan.entries) if folded else {e.name: [e] for e in plan.entries}
    times = {e.layer: e.ms for e in plan.entries if e.ms}  # shown at the first matrix of a layer
    total = plan.after.gradient_bytes or 1
    rows = [_row(name, group, times, total) for name, group in groups.items()]
    notes: dict[str, int] = {}
    for row in rows:
        if row["note"]:
            row["note"] = str(notes.setdefault(row["note"], len(notes) + 1))
    hidden = {"type": folded, "n": len(rows) == len(plan.entries)}
    columns = [
        [head, *(row[head] for row in rows)] for head in (rows[0] if rows else ()) if not hidden.get(head)
    ]
    shown = [column for column in columns if any(column[1:])]
    left = [i for i, column in enumerate(shown) if column[0] in ("layer", "type", "shape")]
    table = Table([*zip(*shown, strict=True)], left, spare=("MACs", "shape", "bytes", "n"))
    return table, "\n".join(f"{number}: {reason}" for reason, number in notes.items())


def folded_rows(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries of each row by its name; those of repeated blocks that look alike are one row.

    >>> from torch import nn
    >>> import pufferfish as pf
    >>> model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), "head": nn.Linear(64, 9)})
    >>> [(name, len(group)) for name, group in folded_rows(pf.plan(model, 8, keep=["blocks.0"])).items()]
    [('blocks.0', 1), ('blocks.1–3', 3), ('head', 1)]
    """
    groups: dict[Hashable, list[Entry]] = {}
    for e in entries:
        without_numbers = tuple("" if part.isdigit() else part for part in e.name.split("."))
        # All that a row shows, except for times and errors: those are shown for the whole row.
        looks = e.type, e.shape, e.rank, str(e.rule), e.reason, e.note, e.before, e.positions, e.trainable
        groups.setdefault((without_numbers, looks), []).append(e)
    rows: dict[str, list[Entry]] = {}
    for group in groups.values():
        parts = [set(part) for part in zip(*(e.name.split(".") for e in group), strict=True)]
        if math.prod(map(len, parts)) == len(group):
            rows[".".join(map(_range, parts))] = group
        else:  # not the same layers in each block
            rows |= {e.name: [e] for e in group}
    return rows


def _range(parts: set[str]) -> str:
    """The numbers of repeated blocks: 1–11, or 1…11 if some between them are missing."""
    if len(parts) == 1:
        return next(iter(parts))
    first, last = min(map(int, parts)), max(map(int, parts))
    return f"{first}{'–' if last - first < len(parts) else '…'}{last}"


def _row(
    name: str, entries: Sequence[Entry], times: dict[str, tuple[float, float]], total: int
) -> dict[str, str]:
    """The cells of matrices that are shown in one row. `times` are taken from the dict when they are shown."""
    e = entries[0]
    macs = [sum(x.macs(low_rank)[0] for x in entries if x.positions) for low_rank in (False, True)]
    errors = sorted({f"{x.error:.3f}" for x in entries if x.error is not None})
    sent = sum(x.after * x.itemsize for x in entries if x.trainable)
    return {
        "layer": name,
        "type": e.type,
        "n": str(len(entries)),
        "shape": _shape(e),
        "rank": str(e.rule or e.rank or "–"),
        "weights": _arrow(sum(x.before for x in entries), sum(x.after for x in entries)),
        "MACs": _arrow(*macs) if macs[0] else "",
        "ms": _times(entries, times),
        "error": "–".join(dict.fromkeys([errors[0], errors[-1]])) if errors else "",
        "bytes": f"{sent / total:.1%}",
        "note": e.reason or e.note,
    }


def _times(entries: Sequence[Entry], times: dict[str, tuple[float, float]]) -> str:
    layers = dict.fromkeys(e.layer for e in entries)
    ms = [sum(both) for both in zip(*(times.pop(layer) for layer in layers if layer in times), strict=True)]
    return "→".join(f"{x:.3g}" if x < 1000 else f"{x:,.0f}" for x in ms)


def _shape(e: Entry) -> str:
    shape = "×".join(map(str, e.shape)) or "?"
    blocks = 1 if e.matrix is None or e.reason == "depthwise" else e.matrix.blocks
    return f"{shape} in {blocks}" if blocks > 1 else shape


def format_count(n: float) -> str:
    """Format a number with three digits and a unit, such as 12.3 M or 4.56 G."""
    for unit in ("", " k", " M", " G"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:,.3g} T"


def _arrow(before: int, after: int) -> str:
    shown = format_count(before), format_count(after)
    return shown[0] if before == after else "→".join(shown)


def _totals(plan: Plan) -> Table:
    before, after = plan.before, plan.after
    rows = [["", "before", "after", ""]]

    def add(label: str, b: int | None, a: int | None) -> None:
        if b and a:
            gain = f"{b / a:.2f}× smaller" if a < b else f"{a / b:.2f}× larger" if a > b else ""
            rows.append([label, f"{b:,}", f"{a:,}", gain])

    add("parameters", before.parameters, after.parameters)
    add("MACs forward", before.forward_macs, after.forward_macs)
    add("MACs backward", before.backward_macs, after.backward_macs)
    add("gradient bytes (DDP)", before.gradient_bytes, after.gradient_bytes)
    add("FSDP2 bytes", _fsdp2_bytes(before), _fsdp2_bytes(after))
    add("memory, SGD momentum", before.memory(1), after.memory(1))
    add("memory, Adam", before.memory(2), after.memory(2))
    return Table(rows, left=(0, 3))


def _fsdp2_bytes(totals: Totals) -> int:
    """Bytes that a worker passes to collectives: it gathers the parameters twice and reduce-scatters the gradients."""
    return 2 * totals.parameter_bytes + totals.gradient_bytes


def _expected(plan: Plan) -> str:
    """Expected gains by the measured times; nothing without them, or while ranks are unknown."""
    measured, before, after = plan.measured, plan.before.gradient_bytes, plan.after.gradient_bytes
    if not measured or not plan.resolved:
        return ""
    gains = [] if plan.speedup is None else [f"{plan.speedup:.2f}× as fast"]
    if gains and (link := measured.get("link")):
        gains.append(f"{plan.speedup_over(link):.2f}× with gradients sent at {format_count(link)}B/s")
    gains += [f"{before / after:.2f}× fewer bytes"] if after else []
    return f"expected on {measured['device']}, {measured['mode']}: {', '.join(gains)}"


def _remarks(plan: Plan) -> list[str]:
    remarks = [obstacles(plan)] if plan.changes_little else _register_lines(plan)
    unresolved = sum(e.rule is not None for e in plan.entries)
    if unresolved:
        remarks.append(
            f"{unresolved} ranks are chosen from the weights when the plan is applied; their matrices count as dense "
            "above. pf.resolve(plan, model) shows the ranks for the current weights."
        )
    raw = [e for e in plan.entries if e.type == "Parameter"]
    if raw:
        names = ", ".join(e.name for e in raw[:4]) + (", …" if len(raw) > 4 else "")
        remarks.append(f"Not covered: {sum(e.before for e in raw):,} weights in raw parameters ({names}).")
    if plan.functional and plan.before.forward_macs:
        macs = sum(plan.functional.values())
        where = sorted(plan.functional, key=plan.functional.__getitem__, reverse=True)
        names = ", ".join(name or "the model itself" for name in where[:4]) + ", …" * (len(where) > 4)
        remarks.append(
            f"Not covered: {macs / plan.before.forward_macs:.1%} of the forward MACs are functional calls "
            f"outside these layers ({names})."
        )
    return remarks


def obstacles(plan: Plan) -> str:
    """Text that says how little a plan changes and what stands in the way: the largest reasons, by parameters."""
    total = max(plan.before.parameters, 1)
    reasons: dict[tuple[str, str], list[Entry]] = {}
    for e in plan.entries:
        if e.reason:
            reasons.setdefault((e.type, e.reason.partition(":")[0]), []).append(e)
    groups = sorted(
        ((sum(e.before for e in group), group) for group in reasons.values()), key=lambda x: -x[0]
    )
    texts = [
        f"{weights / total:.0%} in {_why(group)}" for weights, group in groups[:3] if weights / total > 0.005
    ]
    changed = sum(e.before for e in plan.entries if not e.reason)
    share = f"{changed / total:.1%} of the parameters" if changed else "nothing"
    return "\n".join(
        [f"The plan changes {share}. What stays dense: {'; '.join(texts) or 'the model has no matrices'}."]
        + _register_lines(plan)
    )


def _why(group: Sequence[Entry]) -> str:
    """The reason of the largest layer, with its name if the reasons of the others differ in details."""
    e = max(group, key=lambda e: e.before)
    reason = e.reason.removeprefix("unsupported: ").removeprefix("embedding: ")
    name = f" ({e.name})" if len({x.reason for x in group}) > 1 else ""
    return f"{e.type}: {reason.removesuffix(f' for {e.type}')}{name}"


def _register_lines(plan: Plan) -> list[str]:
    """Lines that register types of layers which stay dense because they are not registered."""
    return list(dict.fromkeys(e.note for e in plan.entries if e.reason and e.note))[:3]


@dataclass(frozen=True)
class Table:
    """Rows of text, the first of which has the heads of the columns; `str` aligns them."""

    rows: Sequence[Sequence[str]]
    left: Sequence[int]  # columns aligned to the left
    spare: Sequence[
        str
    ] = ()  # heads of columns to leave out where the table is too wide, the first one first

    def fitted(self, width: int) -> Table:
        """The table without as many spare columns as make it wider than `width`.

        Of the columns left out, those that still fit come back, the most important first.

        >>> table = Table([["layer", "MACs", "note"], ["conv1", "4.83 G", "1"]], left=(0, 2), spare=("MACs", "note"))
        >>> print(table.fitted(14))
        layer  note
        conv1  1
        >>> print(Table([["a", "b", "cccc", "d"], ["1", "2", "3", "4"]], left=(), spare=("b", "cccc", "d")).fitted(8))
        a  b  d
        1  2  4
        """
        out: list[str] = []
        for head in self.spare:
            if self._without(out)._width() <= width:
                break
            out.append(head)
        for head in reversed(out):
            fewer = [other for other in out if other != head]
            out = fewer if self._without(fewer)._width() <= width else out
        return self._without(out)

    def _width(self) -> int:
        return max(map(len, str(self).splitlines()))

    def _without(self, heads: Sequence[str]) -> Table:
        columns = [*zip(*self.rows, strict=True)]
        kept = [i for i, column in enumerate(columns) if column[0] not in heads]
        left = [new for new, old in enumerate(kept) if old in self.left]
        return Table([*zip(*(columns[i] for i in kept), strict=True)], left, self.spare)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if i in self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in self.rows
        )
        return "\n".join(line.rstrip() for line in lines)


@contextmanager
def display_progress(display: Display) -> Iterator[None]:
    """Show the progress of loops by `display`, inside the context."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def progress(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Context of a long loop; gives a function to call with the amount that was done, out of `total`."""
    display = _display.get()
    if display is None:
        yield lambda amount: None
        return
    with display(text, total) as advance:
        yield advance


def track(items: Collection[T], text: str) -> Iterator[T]:
    """Iterate over `items` and report each as done when the next one is asked for.

    >>> @contextmanager
    ... def display(text, total):
    ...     yield lambda amount: print(f"{text}: {amount} of {total} done")
    >>> with display_progress(display):
    ...     for layer in track(["up", "down"], "layers"):
    ...         print(layer)
    up
    layers: 1 of 2 done
    down
    layers: 1 of 2 done
    """
    with progress(text, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
