"""Plans as data: an `Entry` for every weight matrix, the `Totals` of the model, and the `Plan`, which JSON can hold."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layers import FactorMap, Matrix
from .json_file import write_text
from .rules import Rule
from .text import Table, obstacles, plan_parts

VERSION = 1  # of the JSON format
LITTLE = 0.1  # share of the parameters below which a plan is said to change little


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One matrix of one layer: its rank, the rule that will choose its rank, or the reason it stays dense."""

    name: str  # name of the layer, and of the matrix where a layer has several: "lstm.weight_ih_l0"
    layer: str
    type: str  # class name of the layer
    shape: tuple[int, ...]  # of the weight
    matrix: Matrix | None = None  # None: the layer cannot be factorized
    rank: int | None = None
    asked: int | None = None  # rank before `at_most` lowered it
    rule: Rule | None = None
    reason: str = ""
    note: str = ""  # remark about the rank, or how to register the layer's type; shown in the printed plan
    held: int | None = None  # number of weights if not that of `shape` (already low-rank, lazy, tied)
    itemsize: int = 4
    trainable: bool = True
    positions: int | None = (
        None  # number of vectors multiplied by the matrix in the example; None: no MACs counted
    )
    grad_positions: int | None = None  # number of these whose gradient is computed in backward
    ms: tuple[float, float] | None = None  # measured time of the whole layer in a step, dense and low-rank
    error: float | None = None  # relative error ‖W − UV‖ / ‖W‖, set by `factorize_`

    @property
    def before(self) -> int:
        """Number of weights in the current model."""
        return math.prod(self.shape) if self.held is None else self.held

    @property
    def after(self) -> int:
        """Number of weights at the planned rank."""
        if self.rank is None or self.matrix is None:
            return self.before
        return self.matrix.factor_numel(self.rank)

    def macs(self, low_rank: bool) -> tuple[int, int]:
        """Forward and backward MACs on the example (0 if the example does not use the layer, or they are not counted)."""
        if self.matrix is None or not self.positions:
            return 0, 0
        x, p = self.matrix, self.positions
        input_grads = p if self.grad_positions is None else self.grad_positions
        weight_grads = p if self.trainable else 0
        if not low_rank or self.rank is None:
            weights = 0 if x.lookup else x.used_blocks * x.m * x.n
            return p * weights, (weight_grads + input_grads) * weights
        down, up = (x.used_blocks * self.rank * side for side in (0 if x.lookup else x.n, x.m))
        # The gradient between the factors is needed for the layer's input and for `down` itself.
        inner_grads = max(weight_grads, input_grads)
        return p * (down + up), (weight_grads + input_grads) * down + (weight_grads + inner_grads) * up

    def keep_dense(self, reason: str) -> Entry:
        """Return the entry without a rank."""
        return dataclasses.replace(self, rank=None, rule=None, reason=reason, note="")

    def with_rank(self, rank: int) -> Entry:
        """Return the entry with this rank."""
        full = min(self.matrix.m, self.matrix.n) if self.matrix else 0
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= full:
            raise ValueError(f"{self.name}: rank {rank!r} is not a whole number from 1 to {full}")
        return dataclasses.replace(self, rank=rank, rule=None, reason="")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Cost of one training step of a whole model: parameters, bytes, MACs."""

    parameters: int
    parameter_bytes: int
    trainable: int  # parameters that require a gradient
    gradient_bytes: int
    forward_macs: int | None = None  # on the plan's example; None without one
    backward_macs: int | None = None

    def memory(self, states: int) -> int:
        """Bytes of weights, gradients and `states` optimizer tensors per parameter (SGD momentum 1, Adam 2)."""
        return self.parameter_bytes + (1 + states) * self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions for every layer of a model, made by `pufferfish.plan` and applied by `factorize_`.

    >>> import torch, pufferfish as pf
    >>> plan = pf.plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), rank=0.25)
    >>> plan["0"].rank, plan.after.parameters
    (16, 2112)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    entries: tuple[Entry, ...]
    before: Totals
    parameters: tuple[str, ...] = ()  # names of the model's parameters, in order
    functional: dict[str, int] = field(default_factory=dict)  # module → MACs outside of known layers
    shared_inputs: tuple[tuple[str, ...], ...] = ()  # layers that the example calls with the same tensor
    measured: dict[str, Any] = field(default_factory=dict)  # device, mode, link, time of a dense step

    def __getitem__(self, name: str) -> Entry:
        if entry := next((e for e in self.entries if e.name == name), None):
            return entry
        raise KeyError(f"the plan has no layer {name!r}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def replace(self, entries: Iterable[Entry]) -> Plan:
        """Return the plan with other entries."""
        return dataclasses.replace(self, entries=tuple(entries))

    @property
    def resolved(self) -> bool:
        """Whether every rank is known, so that no rule still needs the weights."""
        return all(e.rule is None for e in self.entries)

    @property
    def ranks(self) -> dict[str, dict[str, int]]:
        """Ranks of all matrices that become low-rank: layer → matrix → rank."""
        ranks: dict[str, dict[str, int]] = {}
        for e in self.entries:
            if e.rank is not None and e.matrix is not None:
                ranks.setdefault(e.layer, {})[e.matrix.name] = e.rank
        return ranks

    @property
    def factor_map(self) -> FactorMap:
        """The parameters of the layers that become low-rank, in both forms. Needs all ranks."""
        ranks = self.ranks
        return FactorMap((e.layer, e.matrix, e.rank) for e in self.entries if e.matrix and e.layer in ranks)

    @property
    def after(self) -> Totals:
        """Cost of the model with the plan applied. Entries whose rule is not resolved count as dense."""
        b = self.before
        saved = [(e, e.before - e.after) for e in self.entries]
        macs = [(e.macs(False), e.macs(True)) for e in self.entries]

        def less_macs(total: int | None, i: int) -> int | None:
            return None if total is None else total - sum(dense[i] - low[i] for dense, low in macs)

        return Totals(
            parameters=b.parameters - sum(x for _, x in saved),
            parameter_bytes=b.parameter_bytes - sum(x * e.itemsize for e, x in saved),
            trainable=b.trainable - sum(x for e, x in saved if e.trainable),
            gradient_bytes=b.gradient_bytes - sum(x * e.itemsize for e, x in saved if e.trainable),
            forward_macs=less_macs(b.forward_macs, 0),
            backward_macs=less_macs(b.backward_macs, 1),
        )

    @property
    def changed(self) -> float:
        """Share of the model's parameters that are in matrices with a rank or a rule."""
        weights = sum(e.before for e in self.entries if e.rank is not None or e.rule is not None)
        return weights / max(self.before.parameters, 1)

    @property
    def speedup(self) -> float | None:
        """Expected time of a dense step over that of a step with the plan, without exchange; None if not measured."""
        return self.speedup_over(None)

    def speedup_over(self, link: float | None) -> float | None:
        """The speedup with the exchange of gradients at `link` bytes per second; None: without it."""
        step = self.measured.get("step_ms")
        if step is None:
            return None
        times = {e.layer: e.ms for e in self.entries if e.ms and (e.rank or e.rule)}
        dense, low_rank = (sum(ms[i] for ms in times.values()) for i in range(2))
        # Layers may add up to more than the step, which hides the time to launch some of their kernels.
        after = max(step - dense + low_rank, low_rank)
        sent = [1e3 * x.gradient_bytes / link if link else 0.0 for x in (self.before, self.after)]
        return float((step + sent[0]) / (after + sent[1]))

    @property
    def changes_little(self) -> bool:
        """Whether the plan changes less than 10 % of the parameters."""
        return self.changed < LITTLE

    def warn_if_little_changes(self, stacklevel: int = 2) -> bool:
        """Warn if the plan changes less than 10 % of the parameters, and say why. Returns whether it warned."""
        if self.changes_little:
            warnings.warn(obstacles(self), stacklevel=stacklevel + 1)
        return self.changes_little

    @property
    def hash(self) -> str:
        """Hash of the decisions (name, type, shape, rank or rule), without costs, times and reasons."""
        ordered = sorted(self.entries, key=lambda e: e.name)
        decisions = [(e.name, e.type, e.shape, e.rule.as_json() if e.rule else e.rank) for e in ordered]
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text, indented for reading and editing."""
        return json.dumps(self.as_data(), indent=1)

    def as_data(self) -> dict[str, Any]:
        """The plan as values that JSON can hold."""
        return {
            "pufferfish_plan": VERSION, "hash": self.hash, "before": dataclasses.asdict(self.before),
            "functional": self.functional, "parameters": self.parameters, "shared_inputs": self.shared_inputs, "measured": self.measured,
            "entries": [_entry_as_data(e) for e in self.entries],
        }  # fmt: skip

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse the text of `to_json`. Ranks may have been edited and are checked."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a plan: not valid JSON: {error}") from None
        return Plan.from_data(data)

    @staticmethod
    def from_data(data: Any) -> Plan:
        """Check and convert the values of `as_data`."""
        version = data.get("pufferfish_plan") if isinstance(data, dict) else None
        if version is None:
            raise ValueError("not a plan; pass what plan.save or `pufferfish plan --out` wrote")
        if version != VERSION:
            raise ValueError(
                f"not a plan of version {VERSION} but of version {version}; use the pufferfish version that saved it"
            )
        try:
            return Plan(
                entries=tuple(_entry_from_data(e) for e in data["entries"]),
                before=Totals(**data["before"]),
                functional=data["functional"],
                parameters=tuple(data["parameters"]),
                shared_inputs=tuple(map(tuple, data["shared_inputs"])),
                measured=data["measured"],
            )
        except (KeyError, TypeError, AttributeError, AssertionError, ArithmeticError) as error:
            raise ValueError(f"the plan is damaged: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        write_text(Path(path), self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a file that `save` has written. Ranks may have been edited and are checked."""
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None

    def __str__(self) -> str:
        parts = plan_parts(self)
        return "\n\n".join(str(part.fitted(80)) if isinstance(part, Table) else part for part in parts)


def _entry_as_data(e: Entry) -> dict[str, Any]:
    """The entry as values that JSON can hold, without defaults."""
    matrix = {"matrix": _without_defaults(e.matrix)} if e.matrix else {}
    rule = {"rule": e.rule.as_json()} if e.rule else {}
    return _without_defaults(e) | matrix | rule


def _without_defaults(record: Entry | Matrix) -> dict[str, Any]:
    fields = ((f, getattr(record, f.name)) for f in dataclasses.fields(record))
    return {f.name: value for f, value in fields if value != f.default}


def _entry_from_data(data: dict[str, Any]) -> Entry:
    """Convert the values of `_entry_as_data`."""
    data = dict(data)
    if data.get("matrix"):
        data["matrix"] = Matrix(**{k: _tuples(v) for k, v in data["matrix"].items()})
    if data.get("rule"):
        data["rule"] = Rule.from_json(data["rule"])
    e = Entry(**{key: _tuples(value) for key, value in data.items()})
    return e if e.rank is None else e.with_rank(e.rank)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_is_plan(plan: object, function: str) -> None:
    """Raise TypeError unless `plan` is a `Plan`: a rank is easily passed instead."""
    if isinstance(plan, Plan):
        return
    hint = "pf.plan(model, rank=0.25)"
    if isinstance(plan, str | Path):
        hint = "pf.Plan.load(file)"
    elif isinstance(plan, int | float | Rule):
        hint = f"pf.plan(model, rank={plan!r})"
    raise TypeError(f"{function}: the plan is of type {type(plan).__name__}; pass {hint}")
