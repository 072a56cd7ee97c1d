"""The switch and the way back on state dicts: tensors in, tensors out, no model needed, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers import Matrix
from ..layers.names import own_keys, own_name
from ..optim.carry import State, dense_state, factor_state, known
from ..optim.factor_map import Change, multiplied
from ..planning import svd
from ..planning.plan import Entry, Plan
from ..planning.planner import check_values, settle


@dataclass(frozen=True)
class Source:
    """A state dict that need not be in memory: shapes are known, values are read when asked for."""

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    get: Callable[[str], Tensor]

    @staticmethod
    def of(state_dict: Mapping[str, Tensor]) -> Source:
        return Source({k: (v.shape, v.dtype) for k, v in state_dict.items()}, state_dict.__getitem__)


@dataclass(frozen=True)
class Made:
    """A tensor of the result: what it will look like, and how to make it when its turn comes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]


def factorize_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """What `factorize_` does to a model, done to its state dict.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> made = pf.factorize_state_dict(model.state_dict(), pf.plan(model))
    >>> {name: tuple(tensor.shape) for name, tensor in made.items()}
    {'0.down.weight': (16, 64), '0.up.weight': (64, 16), '0.up.bias': (64,)}
    """
    source = Source.of(state_dict)
    return {made.name: made.make() for made in factorized(source, resolve(source, plan))}


def merge_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """The way back: the dense state dict that the factors stand for. `plan` holds the ranks.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> plan = pf.plan(model)
    >>> list(merge_state_dict(pf.factorize_state_dict(model.state_dict(), plan), plan))
    ['0.weight', '0.bias']
    """
    return {made.name: made.make() for made in merged(Source.of(state_dict), plan)}


def resolve(source: Source, plan: Plan) -> Plan:
    """The plan with every rule answered from the state dict's weights."""
    keys = _actual(source)
    spectra = {}
    for e in plan.entries:
        if e.rule is not None and e.matrix is not None:
            weight = source.get(_find(keys, e, e.matrix.weight))
            check_values(e.name, weight)
            spectra[e.name] = svd.spectrum(e.matrix.unroll(weight))
    return settle(plan, spectra) if spectra else plan


def factorized(source: Source, plan: Plan) -> list[Made]:
    """The low-rank state dict, in the dense one's order. Checks that everything fits; computes nothing yet."""
    keys = _actual(source)
    layers = {key: layer for layer in _layers(plan, keys) for key in layer.dense_keys.values()}
    made: list[Made] = []
    for key, (shape, dtype) in source.shapes.items():
        if key not in layers:
            made.append(Made(key, shape, dtype, lambda key=key: source.get(key)))  # type: ignore[misc]
            continue
        layer, dense = layers[key], layers[key].dense_name(key)
        for e in layer.entries:
            x = e.matrix
            assert x is not None
            if x.weight == dense and e.rank is not None:
                _check_shape(e, x, shape, key)
                made += _pair(source, key, layer, e, dtype)
            for name, rows, target in x.moves(e.rank is not None):
                if name == dense:
                    part = torch.Size((rows.stop - rows.start, *shape[1:]))
                    take = lambda key=key, rows=rows: source.get(key)[rows]  # noqa: E731
                    made.append(Made(layer.key(target), part, dtype, take))
    return made


def merged(source: Source, plan: Plan) -> list[Made]:
    """The dense state dict, in the low-rank one's order. Checks that everything fits; computes nothing yet."""
    keys = _actual(source)
    made: list[Made] = []
    owners: dict[str, tuple[_Layer, str]] = {}
    for layer in _layers(plan, keys, low_rank=True):
        for dense, parts in layer.change.parts.items():
            owners |= {layer.key(part): (layer, dense) for part in parts}
    done = set()
    for key, (shape, dtype) in source.shapes.items():
        if key not in owners:
            made.append(Made(key, shape, dtype, lambda key=key: source.get(key)))  # type: ignore[misc]
            continue
        layer, dense = owners[key]
        name = layer.key(dense)
        if name in done:
            continue
        done.add(name)
        whole = layer.dense_shape(dense)
        make = lambda layer=layer, dense=dense, dtype=dtype: layer.dense_tensor(source, dense, dtype)  # noqa: E731
        made.append(Made(name, whole, dtype, make))
    return made


@dataclass(frozen=True)
class _Layer:
    """One layer that is, or becomes, low-rank, and its keys in the state dict."""

    prefix: str  # of the actual keys, wrappers included
    entries: list[Entry]
    dense_keys: dict[str, str]  # dense parameter → actual key (when the state dict is dense)

    def key(self, name: str) -> str:
        return self.prefix + name

    def dense_name(self, key: str) -> str:
        return key.removeprefix(self.prefix)

    @property
    def change(self) -> Change:
        matrices = [e.matrix for e in self.entries if e.matrix is not None]
        ranks = {e.matrix.name: e.rank for e in self.entries if e.matrix and e.rank}
        return Change(self.entries[0].layer, matrices, ranks, {}, {})

    def dense_shape(self, dense: str) -> torch.Size:
        length, tail = 0, torch.Size(())
        for x in self.change.matrices:
            if x.weight == dense:
                length, tail = max(length, x.rows.stop), torch.Size(x.shape[1:])
            for name, rows, _ in x.moves(True):
                length = max(length, rows.stop) if name == dense else length
        return torch.Size((length, *tail))

    def dense_tensor(self, source: Source, dense: str, dtype: torch.dtype) -> Tensor:
        def made(x: Matrix) -> Tensor:
            return multiplied(x, source.get(self.key(x.down)), source.get(self.key(x.up)))

        whole = torch.empty(self.dense_shape(dense), dtype=dtype)
        return self.change.assemble(dense, whole, made, lambda part: source.get(self.key(part)))


def _actual(source: Source) -> dict[str, str]:
    """Own name → key as it stands in the state dict."""
    return {own: key for key, own in own_keys(source.shapes).items()}


def _find(keys: Mapping[str, str], e: Entry, name: str) -> str:
    own = f"{e.layer}.{name}" if e.layer else name
    if own not in keys:
        raise ValueError(f"{e.name}: the checkpoint has no tensor {own!r}; is the plan for this model?")
    return keys[own]


def _layers(plan: Plan, keys: Mapping[str, str], low_rank: bool = False) -> Iterator[_Layer]:
    by_layer: dict[str, list[Entry]] = {}
    changing = {e.layer for e in plan.entries if e.rank is not None}
    for e in plan.entries:
        if e.layer in changing and e.matrix is not None:
            by_layer.setdefault(e.layer, []).append(e)
    for entries in by_layer.values():
        first = next(e for e in entries if e.rank is not None)
        x = first.matrix
        assert x is not None
        anchor = x.down if low_rank else x.weight
        prefix = _find(keys, first, anchor).removesuffix(anchor)
        found: dict[str, str] = {}
        for e in entries:
            x = e.matrix
            assert x is not None
            factorized = e.rank is not None
            if low_rank:
                wanted = [x.down, x.up] if factorized else []
                wanted += [target for *_, target in x.moves(factorized)]
            else:
                wanted = [x.weight] + ([x.bias] if x.bias else [])
            found |= {name: _find(keys, e, name) for name in wanted}
        yield _Layer(prefix, entries, {} if low_rank else found)


def _check_shape(e: Entry, x: Matrix, shape: torch.Size, key: str) -> None:
    if len(shape) != len(x.shape) or shape[1:] != torch.Size(x.shape[1:]) or shape[0] < x.rows.stop:
        got, want = ("×".join(map(str, s)) for s in (shape, x.shape))
        raise ValueError(f"{e.name}: the plan is for a weight of {want}, the checkpoint's {key!r} is {got}")


def _pair(source: Source, key: str, layer: _Layer, e: Entry, dtype: torch.dtype) -> list[Made]:
    """down.weight and up.weight from one SVD, which is run for the first and let go with the second."""
    x, r = e.matrix, e.rank
    assert x is not None and r is not None  # noqa: PT018
    held: list[Tensor] = []

    def down() -> Tensor:
        weight = source.get(key)
        check_values(e.name, weight)
        U, V, _ = svd.split(x.unroll(weight), r)
        first, second = x.fold(U, V)
        held.append(second.to(dtype))
        return first.to(dtype)

    shapes = x.fold(
        torch.empty(x.blocks, x.m, r, device="meta"), torch.empty(x.blocks, r, x.n, device="meta")
    )
    return [
        Made(layer.key(x.down), shapes[0].shape, dtype, down),
        Made(layer.key(x.up), shapes[1].shape, dtype, held.pop),
    ]


def convert_optimizer(
    saved: dict[str, Any], dense: Source, low_rank: Source, plan: Plan, *, back: bool = False
) -> dict[str, Any]:
    """An optimizer's `state_dict()` carried from the dense state dict to the low-rank one, or back.

    Parameters have numbers there, not names. Names are known where the optimizer was given
    `named_parameters()`; else the numbers must count the model's parameters in their order.
    """
    dense_keys, low_rank_keys = _actual(dense), _actual(low_rank)
    before, after = list(plan.parameters), low_rank_names(plan)
    before, after = (after, before) if back else (before, after)
    old, old_keys = (low_rank, low_rank_keys) if back else (dense, dense_keys)
    names = _numbered(saved, {name: old.shapes[old_keys[name]][0] for name in before if name in old_keys})

    # old name → (layer, dense parameter in it, new names)
    replaced: dict[str, tuple[_Layer, str, list[str]]] = {}
    layers = [_own(layer) for layer in _layers(plan, {n: n for n in before}, low_rank=back)]
    for layer in layers:
        for part, parts in layer.change.parts.items():
            olds, news = (parts, [part]) if back else ([part], parts)
            replaced |= {layer.key(old): (layer, part, [layer.key(new) for new in news]) for old in olds}

    states = {names[i]: state for i, state in saved["state"].items()}
    carried: dict[str, State] = {}
    for name, state in states.items():
        if name not in replaced:
            carried[name] = state
            continue
        layer, part, news = replaced[name]
        change = layer.change
        for x, parts in change.parts.items():
            if x == part:
                change.dense = {x: dense.get(dense_keys[layer.key(x)])}
                change.low_rank = {p: low_rank.get(low_rank_keys[layer.key(p)]) for p in parts}
        if not all(
            known(states.get(layer.key(p), {"": 0})) for p in (change.parts[part] if back else [part])
        ):
            continue  # all of a parameter's state or none
        if not back:
            carried |= {layer.key(k): s for k, s in factor_state(change, part, state).items()}
        elif news[0] not in carried:
            pieces = {p: states[layer.key(p)] for p in change.parts[part]}
            carried[news[0]] = dense_state(change, part, pieces)

    groups = []
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        had = [names[i] for i in group["params"]]
        new = list(
            dict.fromkeys(n for name in had for n in (replaced[name][2] if name in replaced else [name]))
        )
        if had == sorted(had, key=before.index):
            new.sort(key=after.index)
        numbers |= {name: len(numbers) + i for i, name in enumerate(new)}
        extra = {"param_names": new} if "param_names" in group else {}
        groups.append({**group, "params": [numbers[name] for name in new], **extra})
    return {**saved, "state": {numbers[n]: s for n, s in carried.items()}, "param_groups": groups}


def low_rank_names(plan: Plan) -> list[str]:
    """The parameters of the low-rank model in its order, from those of the dense one.

    A module yields its own parameters before its children's, so inside a layer the names without a dot
    come first and the others by child.
    """
    keys = {name: name for name in plan.parameters}
    owner: dict[str, tuple[_Layer, str]] = {}
    for layer in map(_own, _layers(plan, keys)):
        for name in plan.parameters:
            if name.startswith(layer.prefix):
                owner[name] = layer, name.removeprefix(layer.prefix)
    names: list[str] = []
    done = set()
    for name in plan.parameters:
        if name not in owner:
            names.append(name)
            continue
        layer = owner[name][0]
        if layer.prefix in done:
            continue
        done.add(layer.prefix)
        parts = layer.change.parts
        inside = [part for own, (x, part) in owner.items() if x is layer]
        flat = [new for part in inside for new in parts.get(part, [part])]
        children = list(dict.fromkeys(n.split(".")[0] for n in flat if "." in n))
        flat.sort(key=lambda n: (1, children.index(n.split(".")[0])) if "." in n else (0, 0))
        names += [layer.key(n) for n in flat]
    return names


def _own(layer: _Layer) -> _Layer:
    name = layer.entries[0].layer
    return _Layer(f"{name}." if name else "", layer.entries, {})


def _numbered(saved: dict[str, Any], shapes: Mapping[str, torch.Size]) -> dict[int, str]:
    """Parameter number → own name; `shapes` are the model's parameters in their order.

    Without names in the groups each group is taken to be in the model's order: then the next parameter
    of the model must be the next one of exactly one group, by its shape.
    """
    given = [own_name(n) for group in saved["param_groups"] for n in group.get("param_names", ())]
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    if len(given) == len(numbers):
        return dict(zip(numbers, given, strict=True))
    waiting = [list(group["params"]) for group in saved["param_groups"]]
    found: dict[int, str] = {}
    for name, shape in shapes.items():
        fitting = [
            group for group in waiting if group and _shape_of(saved["state"].get(group[0])) in (None, shape)
        ]
        if len(fitting) == 1:
            found[fitting[0].pop(0)] = name
    if len(found) != len(numbers) or len(found) != len(shapes):
        raise ValueError(
            "the optimizer state cannot be matched to the parameters: its groups carry no names and do not count "
            "the model's parameters in order; build the optimizer with model.named_parameters(), or leave it out"
        )
    return found


def _shape_of(state: State | None) -> torch.Size | None:
    values = (state or {}).values()
    return next((v.shape for v in values if isinstance(v, Tensor) and v.dim()), None)
