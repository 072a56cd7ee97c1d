"""`Route`: the low-rank parameters that each parameter of a sharded dense model becomes, and its transfer to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...layers import FactorMap, low_rank_type
from ...layers.matrix import Index, at_least_fp32
from ...layers.names import named_modules, own_name
from ...lowrank.rewrite import set_parameter
from ...optim.carry import Carrier, State, project, state_kinds
from ...planning.entries import Entry
from ...planning.plan import Plan
from .outline import local, shard_like, whole

#: Whole down.weight and up.weight by entry name.
Factors = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Route:
    """The low-rank parameters that one dense parameter becomes."""

    targets: list[str]  # names of the new parameters, in their order
    entries: list[Entry] = field(default_factory=list)  # its matrices that are factorized
    slices: list[tuple[Index, str]] = field(default_factory=list)  # part that is copied, name of the copy

    @property
    def unchanged(self) -> bool:
        """Whether it stays the same parameter, under this or another name."""
        return not self.entries and len(self.targets) == 1


def find_routes(dense: nn.Module, plan: Plan) -> dict[str, Route]:
    """Routes of all parameters of the dense model, by name."""
    routes = {own_name(name): Route([own_name(name)]) for name, _ in dense.named_parameters()}
    layers = {name: module for name, _, module in named_modules(dense)}
    for layer, ranks in plan.ranks.items():
        kind = low_rank_type(type(layers[layer])) if layer in layers else None
        if kind is None:
            continue  # `reshape_` raises for it
        mapping = FactorMap(kind.matrices(layers[layer]), ranks, {}, {})
        for source, targets in mapping.targets.items():
            routes[f"{layer}.{source}"] = Route([f"{layer}.{target}" for target in targets])
        for x in mapping.matrices:
            for source, index, target in x.copied_slices(x.name in ranks):
                routes[f"{layer}.{source}"].slices.append((index, f"{layer}.{target}"))
    for e in plan:
        if e.rank is not None and e.matrix is not None and f"{e.layer}.{e.matrix.weight}" in routes:
            routes[f"{e.layer}.{e.matrix.weight}"].entries.append(e)
    return routes


class NewParameters:
    """Parameters of the new model, assigned one by one."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths: dict[str, list[str]] = {}  # a tied parameter has several paths
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
        self.put(name, nn.Parameter(shard_like(full, like, like.dtype, self.device), like.requires_grad))


def transfer(old: nn.Parameter, route: Route, factors: Factors, new: NewParameters, carrier: Carrier) -> None:
    """Assign the factors and slices of one dense parameter to the new model, then its optimizer state; free it."""
    for e in route.entries:
        assert e.matrix is not None
        for name, value in zip((e.matrix.down, e.matrix.up), factors[e.name], strict=True):
            new.fill(f"{e.layer}.{name}", value)
    if route.slices:
        full = whole(old)
        for index, name in route.slices:
            new.fill(name, full[index])
        del full
    parameters = {name: new.get(name) for name in route.targets}
    if (draft := carrier.replace([old], list(parameters.values()))) is not None:
        state = draft.state.pop(old, {})
        if carrier.carries(draft, state):
            for name, carried in _factor_states(state, route, factors, parameters).items():
                draft.set_state(parameters[name], carried)
        else:
            draft.reset_state(parameters.values())
    old.grad = None
    local(old).untyped_storage().resize_(0)  # FSDP keeps a reference to the tensor


def _factor_states(
    state: State, route: Route, factors: Factors, parameters: Mapping[str, Tensor]
) -> dict[str, State]:
    """State of the new parameters from that of the dense one. One tensor of the state is gathered at a time."""
    kinds = state_kinds(state)
    states: dict[str, State] = {name: {} for name in parameters}
    for key in list(state):
        value = state.pop(key)
        if key not in kinds or value is None:
            for carried in states.values():
                carried[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        value, dtype = whole(value), value.dtype  # frees the shard
        for name, piece in _pieces(kinds[key], value, route, factors):
            states[name][key] = shard_like(piece, parameters[name], dtype, parameters[name].device)
        del value, piece
    return states


def _pieces(kind: str, full: Tensor, route: Route, factors: Factors) -> Iterator[tuple[str, Tensor]]:
    """A whole tensor of optimizer state, converted for each of the new parameters."""
    for index, name in route.slices:
        yield name, full[index]
    for e in route.entries:
        assert e.matrix is not None
        x, (U, V) = e.matrix, map(at_least_fp32, e.matrix.to_factors(*factors[e.name]))
        pair = x.from_factors(*project(kind, at_least_fp32(x.to_matrix(full)), U, V))
        yield from zip((f"{e.layer}.{x.down}", f"{e.layer}.{x.up}"), pair, strict=True)
