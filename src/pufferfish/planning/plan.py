"""`Plan`: what is decided for every layer. Data that can be printed, saved, edited and compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layers import Matrix
from .cost import Totals
from .rules import Rule

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One matrix of one layer: its rank, the rule that will give it one, or the reason it stays dense."""

    name: str  # the layer's name, and the matrix' where a layer has several: "lstm.weight_ih_l0"
    layer: str
    type: str
    shape: tuple[int, ...]  # of the weight
    matrix: Matrix | None = None  # None: not a layer we can change
    rank: int | None = None
    asked: int | None = None  # the rank before `max_jump` raised it or left the layer dense
    rule: Rule | None = None
    reason: str = ""
    note: str = ""  # what the reader should know about the rank
    held: int | None = None  # weights there are, where the shape does not tell (low-rank already, lazy)
    itemsize: int = 4
    trainable: bool = True
    positions: int | None = None  # vectors the matrix is multiplied with in the example
    grad_positions: int | None = None  # those of them that backward wants the gradient of
    ms: tuple[float, float] | None = None  # measured, dense and low-rank, of the whole layer
    error: float | None = None  # ‖W − UV‖ / ‖W‖, known once factorized

    def __post_init__(self) -> None:
        if self.rank is not None:
            full = self.matrix.full_rank if self.matrix else 0
            if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= full:
                raise ValueError(f"{self.name}: rank {self.rank!r} is not a whole number from 1 to {full}")

    @property
    def before(self) -> int:
        """Weights as they are now."""
        return math.prod(self.shape) if self.held is None else self.held

    @property
    def after(self) -> int:
        """Weights at the planned rank."""
        return (
            self.before if self.rank is None or self.matrix is None else self.matrix.factor_numel(self.rank)
        )

    def macs(self, low_rank: bool) -> tuple[int, int]:
        """Forward and backward MACs on the example (0 where it did not come by)."""
        if self.matrix is None or not self.positions:
            return 0, 0
        x, p = self.matrix, self.positions
        below = p if self.grad_positions is None else self.grad_positions
        trained = p if self.trainable else 0
        if not low_rank or self.rank is None:
            return p * x.numel, (trained + below) * x.numel
        down, up = (x.blocks * self.rank * side for side in (x.n, x.m))
        # Between the factors a gradient is wanted by what lies below, and by `down` itself.
        return p * (down + up), (trained + below) * down + (trained + max(trained, below)) * up

    def stays(self, reason: str) -> Entry:
        return dataclasses.replace(self, rank=None, rule=None, reason=reason, note="")

    def ruled(self, rule: Rule) -> Entry:
        return dataclasses.replace(self, rank=None, rule=rule, reason="", note=rule.note(self.name))

    def ranked(self, rank: int) -> Entry:
        return dataclasses.replace(self, rank=rank, rule=None, reason="")

    def timed(self, ms: tuple[float, float]) -> Entry:
        """With measured times; dense if the low-rank form is the slower one."""
        timed = dataclasses.replace(self, ms=ms)
        if (self.rank or self.rule) and ms[1] >= ms[0]:
            return timed.stays(f"slower when measured: {ms[0]:.3g} ms dense, {ms[1]:.3g} ms low-rank")
        return timed

    def as_json(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["matrix"] = self.matrix and _without_defaults(self.matrix)
        data["rule"] = self.rule and self.rule.as_json()
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {key: value for key, value in data.items() if value != defaults[key]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Entry:
        data = dict(data)
        if data.get("matrix"):
            data["matrix"] = Matrix(**{k: _tuples(v) for k, v in data["matrix"].items()})
        if data.get("rule"):
            data["rule"] = Rule.from_json(data["rule"])
        return Entry(**{key: _tuples(value) for key, value in data.items()})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions for every layer of a model, made by `pufferfish.plan`, applied by `factorize_`.

    >>> import torch, pufferfish as pf
    >>> made = pf.plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), rank=0.25)
    >>> made["0"].rank, made.after.parameters
    (16, 2112)
    >>> Plan.from_json(made.to_json()) == made
    True
    """

    entries: tuple[Entry, ...]
    multiple: int
    min_saving: float
    before: Totals
    parameters: tuple[str, ...] = ()  # the model's parameter names in their order
    functional: dict[str, int] = field(default_factory=dict)  # MACs of the example outside known layers

    def __getitem__(self, name: str) -> Entry:
        for e in self.entries:
            if e.name == name:
                return e
        raise KeyError(f"the plan has no layer {name!r}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def replace(self, entries: Iterable[Entry]) -> Plan:
        """The same plan with other entries."""
        return dataclasses.replace(self, entries=tuple(entries))

    @property
    def resolved(self) -> bool:
        """Whether every rank is known: no rule waits for the weights."""
        return all(e.rule is None for e in self.entries)

    @property
    def ranks(self) -> dict[str, dict[str, int]]:
        """Layer → matrix → rank, of everything that becomes low-rank."""
        found: dict[str, dict[str, int]] = {}
        for e in self.entries:
            if e.rank is not None and e.matrix is not None:
                found.setdefault(e.layer, {})[e.matrix.name] = e.rank
        return found

    @property
    def after(self) -> Totals:
        """The model's cost once the plan is applied; entries that wait for a rule count as dense."""
        b = self.before
        saved = [(e, e.before - e.after) for e in self.entries]
        gone = sum(x for _, x in saved)
        macs = [(e.macs(False), e.macs(True)) for e in self.entries]
        return Totals(
            parameters=b.parameters - gone,
            parameter_bytes=b.parameter_bytes - sum(x * e.itemsize for e, x in saved),
            trainable=b.trainable - sum(x for e, x in saved if e.trainable),
            gradient_bytes=b.gradient_bytes - sum(x * e.itemsize for e, x in saved if e.trainable),
            forward_macs=None
            if b.forward_macs is None
            else b.forward_macs - sum(d[0] - r[0] for d, r in macs),
            backward_macs=None
            if b.backward_macs is None
            else b.backward_macs - sum(d[1] - r[1] for d, r in macs),
        )

    @property
    def hash(self) -> str:
        """Identifies the decisions (name, type, shape, rank or rule), not costs, times or reasons."""
        decisions = [
            (e.name, e.type, e.shape, e.rule.as_json() if e.rule else e.rank)
            for e in sorted(self.entries, key=lambda e: e.name)
        ]
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(
            {
                "pufferfish_plan": VERSION,
                "hash": self.hash,
                "multiple": self.multiple,
                "min_saving": self.min_saving,
                "before": dataclasses.asdict(self.before),
                "functional": self.functional,
                "parameters": self.parameters,
                "entries": [e.as_json() for e in self.entries],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read `to_json`'s text back. Ranks may have been edited; they are checked."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a plan: {error}") from None
        version = data.get("pufferfish_plan") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(
                f"this is not a plan of version {VERSION}"
                + (f" but of version {version}: it needs another pufferfish" if version else "")
            )
        try:
            entries = tuple(Entry.from_json(e) for e in data["entries"])
            return Plan(
                entries=entries,
                multiple=data["multiple"],
                min_saving=data["min_saving"],
                before=Totals(**data["before"]),
                functional=data["functional"],
                parameters=tuple(data["parameters"]),
            )
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"the plan is damaged: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            return Plan.from_json(Path(path).read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None

    def __str__(self) -> str:
        from .table import plan_table  # only printing needs it

        return plan_table(self)


def _without_defaults(matrix: Matrix) -> dict[str, Any]:
    return {
        f.name: getattr(matrix, f.name)
        for f in dataclasses.fields(matrix)
        if getattr(matrix, f.name) != f.default
    }


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
