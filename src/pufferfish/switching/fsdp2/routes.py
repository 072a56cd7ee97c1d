"""What becomes of each parameter of a sharded dense model in the low-rank one that takes over from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...layers import low_rank_type
from ...layers.names import named_modules, own_name
from ...lowrank.factorize import set_parameter
from ...optim.carry import Carrier, State, kinds_of, project, swap, wide, with_square, with_variance
from ...optim.factor_map import Change
from ...planning.plan import Entry, Plan
from .outline import local, part, whole

Factors = dict[str, tuple[Tensor, Tensor]]  # entry → down.weight and up.weight, whole


@dataclass
class Route:
    """What becomes of one dense parameter."""

    targets: list[str]  # the new parameters, in their order
    entries: list[Entry] = field(default_factory=list)  # its matrices that are split
    slices: list[tuple[slice, str]] = field(default_factory=list)  # rows that are carried over, new name

    @property
    def same(self) -> bool:
        """It stays the same parameter, under this or another name."""
        return not self.entries and len(self.targets) == 1


def find_routes(dense: nn.Module, plan: Plan) -> dict[str, Route]:
    """For every parameter of the dense model."""
    routes = {own_name(name): Route([own_name(name)]) for name, _ in dense.named_parameters()}
    layers = {name: module for name, _, module in named_modules(dense)}
    for layer, ranks in plan.ranks.items():
        kind = low_rank_type(type(layers[layer])) if layer in layers else None
        if kind is None:
            continue  # `reshape_` is about to say what does not fit
        change = Change(layer, kind.matrices(layers[layer]), ranks, {}, {})
        for source, targets in change.parts.items():
            routes[f"{layer}.{source}"] = Route([f"{layer}.{target}" for target in targets])
        for x in change.matrices:
            for source, rows, target in x.moves(x.name in ranks):
                routes[f"{layer}.{source}"].slices.append((rows, f"{layer}.{target}"))
    for e in plan:
        if e.rank is not None and e.matrix is not None and f"{e.layer}.{e.matrix.weight}" in routes:
            routes[f"{e.layer}.{e.matrix.weight}"].entries.append(e)
    return routes


class Arrivals:
    """The new model, which takes its parameters in one by one."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths: dict[str, list[str]] = {}  # a tied parameter has several
        names: dict[int, str] = {}
        for path, p in model.named_parameters(remove_duplicate=False):
            self.paths.setdefault(names.setdefault(id(p), own_name(path)), []).append(path)

    def get(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(self.paths[name][0])

    def put(self, name: str, parameter: nn.Parameter) -> None:
        for path in self.paths[name]:
            set_parameter(self.model, path, parameter)

    def fill(self, name: str, full: Tensor) -> None:
        like = self.get(name)
        self.put(name, nn.Parameter(part(full, like, like.dtype, self.device), like.requires_grad))


def take_apart(
    old: nn.Parameter, route: Route, factors: Factors, arrivals: Arrivals, carrier: Carrier
) -> None:
    """One dense parameter's factors and slices into the new model, its state after them; then it is freed."""
    for e in route.entries:
        assert e.matrix is not None
        for name, value in zip((e.matrix.down, e.matrix.up), factors[e.name], strict=True):
            arrivals.fill(f"{e.layer}.{name}", value)
    if route.slices:
        full = whole(old)
        for rows, name in route.slices:
            arrivals.fill(name, full[rows])
        del full
    news = {name: arrivals.get(name) for name in route.targets}
    for optimizer in carrier.optimizers:
        if not swap(optimizer, [old], list(news.values())):
            continue
        state = optimizer.state.pop(old, {})
        if carrier.carry and state and carrier._can(optimizer, state):
            for name, carried in _carried(state, route, factors, news).items():
                optimizer.state[news[name]] = carried
        else:
            carrier._fresh(optimizer, list(news.values()))
    old.grad = None
    local(old).untyped_storage().resize_(0)  # FSDP holds on to the tensor


def _carried(state: State, route: Route, factors: Factors, news: Mapping[str, Tensor]) -> dict[str, State]:
    """`optim.factor_state` of shards: one tensor of the state is whole at a time."""
    kinds, state = kinds_of(state), with_variance(state)
    made: dict[str, State] = {name: {} for name in news}
    for key in list(state):
        value = state.pop(key)
        if key not in kinds or value is None:
            for carried in made.values():
                carried[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        value, dtype = whole(value), value.dtype  # the shard is gone now
        for name, piece in _pieces(kinds[key], value, route, factors):
            made[name][key] = part(piece, news[name], dtype, news[name].device)
        del value, piece
    return {name: with_square(carried) for name, carried in made.items()}


def _pieces(kind: str, full: Tensor, route: Route, factors: Factors) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer keeps for a whole dense parameter, as it would keep it for the new ones."""
    for rows, name in route.slices:
        yield name, full[rows]
    for e in route.entries:
        assert e.matrix is not None
        x, (U, V) = e.matrix, map(wide, e.matrix.unfold(*factors[e.name]))
        pair = x.fold(*project(kind, wide(x.unroll(full)), U, V))
        yield from zip((f"{e.layer}.{x.down}", f"{e.layer}.{x.up}"), pair, strict=True)
