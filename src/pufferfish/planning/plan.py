"""`plan`: which layer of a model becomes low-rank, at which rank, and why; `Plan`: the decisions as data; `resolve`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import FactorMap, LowRankLinear, Matrix, low_rank_type
from ..layers.names import own_name, unwrap
from . import svd
from .entries import Entry, as_patterns, candidates, select
from .json_file import write_text
from .profile import Call, Example, Profile, profile
from .rules import RankLike, Rule, apply_rules, as_rule
from .text import Table, obstacles, plan_parts, track
from .timing import Mode, with_measured_times

VERSION = 1  # of the JSON format
LITTLE = 0.1  # share of the parameters below which a plan is said to change little


def plan(
    model: nn.Module,
    rank: RankLike = 0.25,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    overrides: Mapping[str, RankLike] | None = None,
    multiple: int = 16,
    min_saving: float = 0.0,
    embed: RankLike | None = None,
    frozen: bool = False,
    example: Example | None = None,
    measure: Mode | bool | None = None,
    link: float | None = None,
) -> Plan:
    """Plan which layers of a model become low-rank. Changes nothing.

    Args:
        rank: A float in (0, 1) is a share of each layer's full rank, an int a fixed rank, or a rule:
            `Ratio`, `Fixed`, `Energy`, `StableRank`, `Budget`. Rules that need the weights choose ranks
            when the plan is applied; `resolve(plan, model)` shows what they choose for the current weights.
        keep: Name patterns (`fnmatch`, over layer names) of layers that stay dense.
        only: Name patterns; if given, all other layers stay dense.
        overrides: Name pattern → rank for some layers; the last match applies.
        multiple: Computed ranks are rounded up to a multiple of it, then down to the largest one that saves
            weights. 16 suits GPUs; 1 reproduces the paper's counts. `Fixed` ranks are not rounded.
        min_saving: Share of a layer's weights that must be saved; a negative value forces factorizing.
        embed: Rank or rule for `nn.Embedding` layers, which stay dense without it. It pays for large vocabularies.
        frozen: Factorize weights that do not require a gradient too. They save no gradient bytes, and training
            cannot reduce the error of the factorization.
        example: A batch (tensor, tuple of arguments, dict of keyword arguments) or a function that runs the
            model. Needed for MACs and for `measure`.
        measure: Time the layers dense and low-rank on the model's device, in the mode that the job runs in, and keep
            those dense that would be slower: "eager" (or True), "compile" or "graph". Graphs and compiled graphs
            have no launch overhead, which outweighs the gain of small layers on a fast GPU. None is "eager" for a
            model on CUDA with an example, and False otherwise. It is also False in a job with several workers, which
            could decide differently: there, set it for the plan of a `Switch`, which makes them agree, or load one
            plan on all.
        link: Bytes of gradients per second that the workers average, such as `Link.all_reduce_rate`. A layer then
            becomes low-rank if that shortens its measured time plus the time to send its gradients.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> print(pf.plan(model, rank=0.25, keep=["2"]))
    layer  shape    rank        weights  bytes  note
    0      256×256    64  65.5 k→32.8 k  92.1%
    2      10×256      –         2.56 k   7.2%     1
    <BLANKLINE>
    1: kept by pattern '2'
    <BLANKLINE>
                             before    after
    parameters               68,362   35,594  1.92× smaller
    gradient bytes (DDP)    273,448  142,376  1.92× smaller
    FSDP2 bytes             820,344  427,128  1.92× smaller
    memory, SGD momentum    820,344  427,128  1.92× smaller
    memory, Adam          1,093,792  569,504  1.92× smaller
    """
    keep, only = as_patterns("keep", keep), as_patterns("only", only)
    rule = as_rule(rank)
    embed_rule = None if embed is None else as_rule(embed, "embed")
    rules = {pattern: as_rule(value) for pattern, value in (overrides or {}).items()}
    if multiple < 1:
        raise ValueError(f"multiple={multiple} is not a whole number ≥ 1")
    if embed_rule and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise ValueError("embed: the model has no nn.Embedding; remove embed=")
    mode = _mode(measure, link, model, example)

    profiled = None if example is None else profile(model, example)
    before = totals(model, profiled)
    entries, layers = candidates(model, profiled, embed=embed_rule is not None, frozen=frozen)
    entries = select(entries, layers, rule, embed=embed_rule, keep=keep, only=only, overrides=rules)
    plan = Plan(
        entries=tuple(entries),
        multiple=multiple,
        min_saving=min_saving,
        before=before,
        parameters=tuple(own_name(name) for name, _ in unwrap(model).named_parameters()),
        functional=profiled.functional if profiled else {},
        shared_inputs=_shared_inputs(profiled.calls, layers) if profiled else (),
    )
    plan = apply_rules(plan, None)
    if mode is None or profiled is None or example is None:
        return plan
    return with_measured_times(plan, model, layers, profiled, example, mode, link)


def _mode(
    measure: Mode | bool | None, link: float | None, model: nn.Module, example: Example | None
) -> Mode | None:
    """The mode to measure layers in; None: they are not measured."""
    mode: Mode | None = None
    if measure:
        if measure not in (True, *get_args(Mode)):
            raise ValueError(f'measure={measure!r} is not "eager", "compile", "graph", True, False or None')
        if example is None:
            raise ValueError(
                f"measure={measure!r} needs example=, a batch with the shapes that the layers see"
            )
        if measure == "graph" and not _on_cuda(model):
            raise ValueError('measure="graph" times CUDA graphs: move the model to a CUDA device')
        mode = "eager" if measure is True else measure
    elif measure is None and example is not None and _on_cuda(model) and not _several_workers():
        mode = "eager"
    if link is not None and not (mode and 0 < link < float("inf")):
        raise ValueError(
            f"link={link!r}: pass the bytes per second that the workers average, above 0, together with example= and measure="
        )
    return mode


def _on_cuda(model: nn.Module) -> bool:
    return {p.device.type for p in model.parameters()} == {"cuda"}


def _several_workers() -> bool:
    """Whether this is a worker of several, in a process group or before it is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return os.environ.get("WORLD_SIZE", "1") != "1"


def totals(model: nn.Module, profile: Profile | None = None) -> Totals:
    """Count the parameters of a model, and its MACs if a `Profile` is given."""
    parameters = [p for p in unwrap(model).parameters() if not is_lazy(p)]
    trainable = [p for p in parameters if p.requires_grad]
    return Totals(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        forward_macs=profile.forward_macs if profile else None,
        backward_macs=profile.backward_macs if profile else None,
    )


def _shared_inputs(
    calls: Mapping[str, Call], modules: Mapping[str, nn.Module]
) -> tuple[tuple[str, ...], ...]:
    """Groups of linear layers that were called with the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, call in calls.items():
        kind = low_rank_type(type(modules[name])) if name in modules else None
        if kind is not None and issubclass(kind, LowRankLinear) and call.args:
            groups.setdefault(id(call.args[0]), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def resolve(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with the ranks that its rules choose for the model's current weights.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> plan = pf.plan(model, rank=pf.Energy(0.5))
    >>> plan["0"].rank, pf.resolve(plan, model)["0"].rank
    (None, 16)
    """
    check_is_plan(plan, "resolve")
    unresolved = [e.name for e in plan.entries if e.rule is not None]
    if not unresolved:
        return plan
    computed = spectra(model, unresolved)
    for name in unresolved:
        if name not in computed:
            raise ValueError(
                f"{name}: the plan has a rule for this layer, "
                "but no layer of the model with this name can be factorized"
            )
    return apply_rules(plan, computed)


def spectra(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Compute the singular values, largest first, of the matrices that can be factorized, by entry name.

    If `names` are given, only these entries are computed. Embeddings are computed only if they are named.

    >>> import pufferfish as pf
    >>> {name: len(s) for name, s in pf.spectra(nn.Sequential(nn.Linear(64, 32))).items()}
    {'0': 32}
    """
    found = track(factorizable(model, names), "computing singular values")
    return {e.name: matrix_spectrum(e, weight) for e, weight in found}


def factorizable(model: nn.Module, names: Iterable[str] | None = None) -> list[tuple[Entry, nn.Parameter]]:
    """Entries that can be factorized, with the parameter that holds each matrix; optionally only `names`."""
    entries, modules = candidates(model, None, embed=names is not None, frozen=True)
    chosen = None if names is None else set(names)
    return [
        (e, modules[e.layer].get_parameter(e.matrix.weight))
        for e in entries
        if e.matrix is not None and not e.reason and (chosen is None or e.name in chosen)
    ]


def matrix_spectrum(entry: Entry, weight: Tensor) -> Tensor:
    """Compute the singular values of one matrix from the dense parameter that holds it."""
    assert entry.matrix is not None
    svd.check_values(entry.name, weight)
    return svd.spectrum(entry.matrix.to_matrix(weight.detach()))


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
    multiple: int  # computed ranks are multiples of it
    min_saving: float  # share of a matrix' weights that must be saved
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
            "pufferfish_plan": VERSION, "hash": self.hash, "multiple": self.multiple, "min_saving": self.min_saving,
            "before": dataclasses.asdict(self.before), "functional": self.functional, "parameters": self.parameters,
            "shared_inputs": self.shared_inputs, "measured": self.measured,
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
                multiple=data["multiple"],
                min_saving=data["min_saving"],
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
    return Entry(**{key: _tuples(value) for key, value in data.items()})


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
