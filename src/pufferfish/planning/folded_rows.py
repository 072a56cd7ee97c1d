"""`folded_rows`: the entries of a plan with repeated blocks as one row each, such as `blocks.1–11.up`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from .plan import Entry


class Row(NamedTuple):
    """Entries that look alike in consecutive blocks, and their common name."""

    parts: tuple[str, ...]  # of the name, between its dots; a range of blocks is "1–11"
    entries: list[Entry]

    @property
    def name(self) -> str:
        return ".".join(self.parts)


def folded_rows(entries: Iterable[Entry]) -> list[Row]:
    """One row per entry, or per entry of several consecutive blocks whose entries are all alike.

    >>> from torch import nn
    >>> import pufferfish as pf
    >>> model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), "head": nn.Linear(64, 9)})
    >>> [(row.name, len(row.entries)) for row in folded_rows(pf.plan(model, 8, keep=["blocks.0"]))]
    [('blocks.0', 1), ('blocks.1–3', 3), ('head', 1)]
    """
    rows = [Row(tuple(e.name.split(".")), [e]) for e in entries]
    for depth in reversed(range(max((len(row.parts) for row in rows), default=0))):
        rows = [*_fold(rows, depth)]
    return rows


def _fold(rows: list[Row], depth: int) -> Iterator[Row]:
    """Fold blocks that are numbered by the part of the name at `depth`."""
    blocks: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        numbered = len(row.parts) > depth and row.parts[depth].isdigit()
        blocks.setdefault(row.parts[: depth + 1] if numbered else row.parts, []).append(row)
    run: list[tuple[str, ...]] = []  # keys of consecutive blocks that look alike
    for key in blocks:
        if run and not _continues(run[-1], key, blocks, depth):
            yield from _merge([blocks[k] for k in run], depth)
            run = []
        run.append(key)
    yield from _merge([blocks[k] for k in run], depth)


def _continues(
    last: tuple[str, ...], key: tuple[str, ...], blocks: dict[tuple[str, ...], list[Row]], depth: int
) -> bool:
    if len(key) != depth + 1 or last[:-1] != key[:-1] or not (last[-1].isdigit() and key[-1].isdigit()):
        return False
    return int(key[-1]) == int(last[-1]) + 1 and _looks(blocks[last], depth) == _looks(blocks[key], depth)


def _looks(block: list[Row], depth: int) -> list[Hashable]:
    return [(row.parts[depth + 1 :], len(row.entries), _look(row.entries[0])) for row in block]


def _look(e: Entry) -> Hashable:
    """All that a row shows, except for times and errors: those are shown for the whole row."""
    return e.type, e.shape, e.rank, str(e.rule), e.reason, e.note, e.before, e.positions, e.trainable


def _merge(blocks: list[list[Row]], depth: int) -> Iterator[Row]:
    if len(blocks) == 1:
        yield from blocks[0]
        return
    for rows in zip(*blocks, strict=True):
        first, last = rows[0].parts, rows[-1].parts
        parts = (*first[:depth], f"{first[depth]}–{last[depth]}", *first[depth + 1 :])
        yield Row(parts, [e for row in rows for e in row.entries])
