"""`Rewrite`: a change of a model's layers and of its optimizers, prepared beside them; `commit` assigns all of it, or nothing.

`Carrier` carries optimizer state from dense parameters to factors and back; if a part of it is unknown, all of it is reset.
With W = U V the gradients are ∂U = G Vᵀ and ∂V = Uᵀ G. Optimizer state is computed from gradients, so it is carried by the same
products, and squares by products with the squared factors.
"""

import copy
import dataclasses
import gc
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ..distributed.ddp import rewrap_
from ..distributed.workers import Workers
from ..layers import (
    FactorMap,
    LowRank,
    LowRankLinear,
    Part,
    SharedInput,
    low_rank_type,
    named_modules,
    own_name,
)
from ..layers.base import CALL_HOOKS, HOOKS, check_structure
from ..layers.matrix import at_least_fp32, product
from ..planning import Entry, Plan
from .optimizers import CARRIED, KINDS, SUPPORTED, State, can_carry, type_name

#: Returns U (blocks, m, r), V (blocks, r, n) and the relative error (None: unknown) of a matrix W (blocks, m, n).
Fill = Callable[[Entry, Tensor], tuple[Tensor, Tensor, float | None]]


class Rewrite:
    """A change of a model's layers and of its optimizers.

    `factorize` or `merge` computes everything beside the model, which stays as it is, and `commit` assigns it.

    Args:
        optimizers: from `check_optimizers`.
        carry: whether optimizer state is carried over to the new parameters, or dropped.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer] = (), carry: bool = True
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.carrier = Carrier(optimizers, model.parameters(), carry)
        self._layers: dict[str, nn.Module] = {}  # the new ones, by path

    def factorize(
        self, plan: Plan, fill: Fill, advance: Callable[[float], None] = lambda amount: None
    ) -> Plan:
        """Prepare low-rank layers. Returns the plan with the errors that `fill` returned.

        Args:
            advance: called with 1 after each layer.
        """
        paths = {name: path for name, path, _ in named_modules(self.model)}
        # All structures first, on the meta device: the constructor of a registered layer type may raise.
        uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        structures = {
            layer: self._structure(layer, paths[layer], ranks, uses) for layer, ranks in plan.ranks.items()
        }
        errors: dict[str, float | None] = {}
        entries = {e.name: e for e in plan.entries}
        for layer, low_rank in structures.items():
            own = {name: entries[own_name(layer, name)] for name in low_rank.ranks}
            errors |= self._split(paths[layer], low_rank, own, fill)
            advance(1)
        for names in plan.shared_inputs:
            layers = [x for x in map(structures.get, names) if isinstance(x, LowRankLinear)]
            if len(layers) > 1:
                SharedInput(layers)
        modules = {kind.__module__ for module in self.model.modules() for kind in type(module).__mro__}
        if any(x.startswith("transformers.") for x in modules):  # a model of it, or a part of one
            from ..integrations import pretrained  # noqa: F401  # extends the save_pretrained of its models
        done = (dataclasses.replace(e, error=errors.get(e.name, e.error)) for e in plan.entries)
        return dataclasses.replace(plan, entries=tuple(done))

    def _structure(self, layer: str, path: str, ranks: dict[str, int], uses: Counter[int]) -> LowRank:
        """A low-rank layer without values, after a check that it can take the place of the dense one.

        Args:
            uses: how often the model has each parameter, by id.
        """
        dense = self.model.get_submodule(path)
        kind = low_rank_type(type(dense))
        assert kind is not None
        low_rank = kind(dense, ranks)
        check_structure(layer, dense, low_rank)
        replaced = low_rank.factor_map.replaced
        for name, targets in replaced.items():
            weight = dense.get_parameter(name)
            if uses[id(weight)] > 1:
                raise ValueError(f"{layer}: its {name} is shared with another layer of this model")
            if type(weight.data) is not Tensor:
                raise ValueError(f"{layer}: its {name} is a {type(weight.data).__name__}, not a plain tensor")
            for target in targets:
                factor = low_rank.get_parameter(target)
                check_accepted(f"{layer}.{target}", factor, [weight], self.optimizers)
        check_hooks(layer, dense, [*replaced])
        return low_rank

    def _split(
        self, path: str, low_rank: LowRank, entries: Mapping[str, Entry], fill: Fill
    ) -> dict[str, float | None]:
        """Prepare one low-rank layer, given its structure and its entries by matrix name. Returns errors by entry name."""
        dense, factor_map = self.model.get_submodule(path), low_rank.factor_map
        errors: dict[str, float | None] = {}
        for name, old in dense.named_parameters(remove_duplicate=False):
            new: dict[str, Tensor] = dict.fromkeys(
                factor_map.targets.get(name, (name,)), old
            )  # the same object
            if len(new) > 1:
                factors = {}
                for part in factor_map.parts[name]:
                    if part.rank is not None:
                        e = entries[part.name]
                        U, V, errors[e.name] = fill(e, part.matrix.to_matrix(old.detach()))
                        factors[part.name] = U, V
                pieces = factor_map.split(name, old.detach(), lambda part, W, own=factors: own[part.name])  # type: ignore[misc]
                new = {target: _parameter(value, old) for target, value in pieces}
                self.carrier.split(factor_map, name, old, new)
            for target, parameter in new.items():
                set_parameter(low_rank, target, parameter)
        self._put(path, dense, low_rank)
        return errors

    def merge(self) -> None:
        """Prepare dense layers with the products of all factors."""
        found: dict[str, LowRank] = {}
        for name, path, module in named_modules(self.model):
            if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in found):
                if path == "":
                    raise ValueError("the model itself is the low-rank layer; wrap it in an nn.Sequential")
                replaced = module.factor_map.replaced.values()
                check_hooks(name, module, [target for targets in replaced for target in targets])
                found[path] = module
        for path, low_rank in found.items():
            self._join(path, low_rank)

    def _join(self, path: str, low_rank: LowRank) -> None:
        """Prepare one dense layer."""
        attributes = {id(x): x for k, x in vars(low_rank._dense[0]).items() if not k.startswith("_")}
        dense = copy.deepcopy(low_rank._dense[0], attributes)  # these stay the same objects
        for name in vars(dense).keys() & vars(low_rank).keys():
            if not name.startswith("_"):  # dropout, training, …, which may have been set since then
                setattr(dense, name, getattr(low_rank, name))
        factor_map = low_rank.factor_map
        for name, meta in list(dense.named_parameters(remove_duplicate=False)):
            old = {t: low_rank.get_parameter(t) for t in factor_map.targets.get(name, (name,))}
            new = next(iter(old.values()))  # renamed: the same object
            if len(old) > 1:
                *_, last = old.values()
                out = torch.empty_like(
                    meta, device=new.device, dtype=new.dtype
                )  # in the memory format of `meta`
                with torch.no_grad():
                    new = _with_flags(factor_map.join(name, old.__getitem__, product, out), last)
                self.carrier.join(factor_map, name, old, new)
            set_parameter(dense, name, new)
        if isinstance(dense, nn.RNNBase):
            dense.flatten_parameters()
        self._put(path, low_rank, dense)

    def _put(self, path: str, old: nn.Module, new: nn.Module) -> None:
        """Note the layer that takes the place of `old`, with its training mode and call hooks."""
        new.train(old.training)
        vars(new).update({hooks: vars(old)[hooks] for hooks in CALL_HOOKS if hooks in vars(old)})
        self._layers[path] = new

    def assign(self, undo: ExitStack) -> None:
        """Assign what was prepared."""
        for path, new in self._layers.items():
            owner, _, leaf = path.rpartition(".")
            assign(undo, self.model.get_submodule(owner), leaf, new)
        self.carrier.commit(undo, {own_name(name): p for name, p in self.model.named_parameters()})


def commit(
    changes: Iterable[Rewrite],
    workers: Workers | None = None,
    wrappers: Iterable[DistributedDataParallel | None] = (),
    attributes: Iterable[tuple[object, str, Any]] = (),
) -> None:
    """Assign prepared changes, and give DDP wrappers a new reducer. Compiled code notices new layers by itself.

    An error takes everything back; a signal takes effect at the end.

    Args:
        workers: begin when all of them are prepared; if one fails before, no model changes.
        wrappers: of the models that change, or of averages of them.
        attributes: object, name and value of what changes with the models.
    """
    rewrapped = [ddp for ddp in wrappers if ddp is not None]
    with _stops_wait(), ExitStack() as undo:
        if workers is not None:
            workers.run_on_all(lambda: None)  # from here on, each of them finishes
        for change in changes:
            change.assign(undo)
        for ddp in rewrapped:
            rewrap_(ddp, undo)
        for owner, name, value in attributes:
            assign(undo, owner, name, value)
        undo.pop_all()
    if rewrapped:
        gc.collect()  # an old reducer is in reference cycles: free its memory now


def assign(undo: ExitStack, owner: object, name: str, value: Any) -> None:
    """Set an attribute that is there, so that `undo` takes it back."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def _stops_wait() -> Iterator[None]:
    """Let signals that ask the process to stop, such as ctrl-C, take effect after the block; a second one does at once."""
    if threading.current_thread() is not threading.main_thread():  # the only one that handles signals
        yield
        return
    arrived: list[int] = []

    def wait(number: int, frame: Any) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            handlers[number](number, frame)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # those that this system has
    handlers: dict[int, Any] = {n: h for n in numbers if callable(h := signal.getsignal(n))}
    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(arrived) == 1:
            signal.raise_signal(arrived[0])


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with the values of `value` and the dtype, memory format, flags and attributes of `like`."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)
    # Compare strides: the weight of a 1 × 1 convolution is contiguous in both formats, but its gradient is not.
    if (
        like.dim() != value.dim()
        or like.stride() != torch.empty_like(like, device="meta", memory_format=order).stride()
    ):
        order = torch.contiguous_format
    stride = torch.empty_like(value, device="meta", memory_format=order).stride()
    own_memory = value.untyped_storage().nbytes() == value.nbytes  # no part of a larger tensor
    if not (own_memory and value.dtype == like.dtype and value.stride() == stride):
        value = torch.empty_like(value, dtype=like.dtype, memory_format=order).copy_(value)
    return _with_flags(value, like)


def _with_flags(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with the flags of `like`, and with its attributes that are no tensors or other objects of its own.

    A `main_grad` has the shape of the dense parameter, and the copies that DDP's mixed precision attaches are its values.
    """
    parameter = nn.Parameter(value, like.requires_grad)
    for key, attribute in vars(like).items():
        if all(isinstance(x, bool | int | float | str | None) for x in pytree.tree_leaves(attribute)):
            vars(parameter)[key] = copy.deepcopy(attribute)
    return parameter


def set_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Assign a parameter by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def check_hooks(name: str, module: nn.Module, replaced: list[str]) -> None:
    """Raise ValueError for hooks that depend on the replaced parameters or on the state dict."""
    for child in module.modules():
        for hooks in HOOKS:
            if hooks not in CALL_HOOKS and getattr(child, hooks):
                raise ValueError(
                    f"{name}: its hooks ({hooks.strip('_')}) cannot be moved to the new layer; remove them"
                )
        if child is not module and any(getattr(child, hooks, None) for hooks in CALL_HOOKS):
            raise ValueError(f"{name}: hooks of its children cannot be moved to the new layer; remove them")
    for label in replaced:
        parameter = module.get_parameter(label)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name}.{label}: its gradient hooks cannot be moved to the new parameter; remove them"
            )


class Carrier:
    """Replaces parameters in the groups of optimizers and carries their state, layer by layer.

    It works on copies of the groups and of the mappings from parameters to state, which `commit` assigns; with `stream`, on
    the optimizers themselves, so that state that is no longer needed is freed at once.

    New parameters go into the group of the old one. Those that its optimizer does not accept go without state into
    another optimizer: into the first group with a matrix or filter, or else into the first one.

    Args:
        carry: without it, replaced parameters start without state.
    """

    def __init__(
        self,
        optimizers: Sequence[optim.Optimizer],
        parameters: Iterable[Tensor],
        carry: bool = True,
        stream: bool = False,
    ) -> None:
        self.carry = carry
        self._drafts = [_Draft(optimizer, stream) for optimizer in optimizers]
        place = {id(p): i for i, p in enumerate(parameters)}
        # state_dict() numbers parameters by their place in the group. A group in the model's order must be in
        # the model's order afterwards too, or a checkpoint would load into the wrong parameters.
        self._ordered = []
        groups = [group for draft in self._drafts for group in draft.groups]
        for group in groups:
            places = [place.get(id(p), -1) for p in group["params"]]
            if places == sorted(places) and -1 not in places:
                self._ordered.append(group)
        self._named = [group for group in groups if "param_names" in group]
        self._names: dict[int, str] = {}
        for group in self._named:
            self._names |= zip(map(id, group["params"]), group["param_names"], strict=True)
        self._reset: set[str] = set()  # optimizer types whose state was dropped

    def split(
        self,
        factor_map: FactorMap,
        name: str,
        old: Tensor,
        new: Mapping[str, Tensor],
        factors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the dense parameter `name` by low-rank ones.

        Args:
            new: by name.
            factors: whole values of those among `new` that are factors, if `new` are shards or have no values.
        """
        if (home := self.replace([old], [*new.values()])) is None:
            return
        state = dict(home.state.pop(old, {}))
        if not self.carries(home, state):
            home.reset_state(new.values())
            return
        get = (new if factors is None else factors).__getitem__
        kinds = state_kinds(state)
        states: dict[str, State] = {target: {} for target in new}
        for key in list(state):
            value = state.pop(
                key
            )  # of a sharded model, one tensor is gathered at a time, and its shard is freed
            if key not in kinds or value is None:
                for carried in states.values():
                    carried[key] = value.clone() if isinstance(value, Tensor) else value
                continue

            def projected(part: Part, M: Tensor, kind: str = kinds[key]) -> tuple[Tensor, Tensor]:
                U, V = (at_least_fp32(x.detach()) for x in part.factors(get))
                return project(kind, at_least_fp32(M), U, V)

            value, dtype = whole(value), value.dtype
            for target, piece in factor_map.split(name, value, projected):
                states[target][key] = placed(piece, new[target], dtype)
            del value, piece
        for target, carried in states.items():
            home.set_state(new[target], carried)

    def join(
        self,
        factor_map: FactorMap,
        name: str,
        old: Mapping[str, Tensor],
        new: Tensor,
        factors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the low-rank parameters `old`, by name, by the dense parameter `name`. Arguments as in `split`."""
        if (home := self.replace([*old.values()], [new])) is None:
            return
        states = {target: home.state.pop(p, {}) for target, p in old.items()}
        if not (all(states.values()) and all(self.carries(home, state) for state in states.values())):
            home.reset_state([new])
            return
        get = (old if factors is None else factors).__getitem__
        first = next(iter(states.values()))
        kinds, joined = state_kinds(first), {}
        for key, value in first.items():
            if key not in kinds or value is None:
                joined[key] = value.clone() if isinstance(value, Tensor) else value
                continue

            def lifted(part: Part, mU: Tensor, mV: Tensor, kind: str = kinds[key]) -> Tensor:
                U, V = (at_least_fp32(x.detach()) for x in part.factors(get))
                return lift(kind, at_least_fp32(mU), at_least_fp32(mV), U, V)

            moments = {target: state[key] for target, state in states.items()}
            out = torch.zeros_like(new, dtype=value.dtype, device=value.device, requires_grad=False)
            joined[key] = factor_map.join(name, moments.__getitem__, lifted, out)
        home.set_state(new, joined)

    def replace(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> "_Draft | None":
        """Put `new` in the place of the first of `old` that an optimizer has, and remove the others of `old`.

        Returns the draft of the optimizer that had it, with its state; None if no optimizer has one of `old`.
        """
        holders = [*dict.fromkeys(draft for p in old for draft in self._drafts if draft.has(p))]
        if not holders:
            return None
        home = holders[0]
        replace_parameters(home.groups, old, [p for p in new if accepts(home.optimizer, p)])
        for other in holders[1:]:
            replace_parameters(other.groups, old, [])
            for p in old:
                other.state.pop(p, None)
        for p in new:
            if not accepts(home.optimizer, p):
                another = next(d for d in self._drafts if accepts(d.optimizer, p))  # see `check_accepted`
                groups = another.groups
                group = next((g for g in groups if any(x.dim() > 1 for x in g["params"])), groups[0])
                group["params"] = [*group["params"], p]
                another.reset_state([p])
        return home

    def carries(self, draft: "_Draft", state: State) -> bool:
        """Whether the state of a replaced parameter is carried. `warn_of_resets` warns where it cannot be."""
        if not (self.carry and state):
            return False
        supported = isinstance(draft.optimizer, SUPPORTED) and can_carry(state)
        if not supported:
            self._reset.add(type_name(draft.optimizer))
        return supported

    def warn_of_resets(self, stacklevel: int = 4) -> None:
        """Warn about state that was not carried."""
        for name in sorted(self._reset):
            warnings.warn(
                f"{name}: the state of replaced parameters was reset; {CARRIED}", stacklevel=stacklevel
            )

    def commit(self, undo: ExitStack, parameters: Mapping[str, Tensor]) -> None:
        """Assign groups and state. `parameters`: of the changed model, by their own names, in its order."""
        place = {id(p): i for i, p in enumerate(parameters.values())}
        for group in self._ordered:
            group["params"] = sorted(group["params"], key=lambda p: place[id(p)])
        names = self._names | {id(p): name for name, p in parameters.items()}
        for group in self._named:
            group["param_names"] = [names[id(p)] for p in group["params"]]
        for draft in self._drafts:
            draft.commit(undo)


def check_accepted(
    name: str, new: Tensor, old: Sequence[Tensor], optimizers: Sequence[optim.Optimizer]
) -> None:
    """Raise ValueError if an optimizer holds one of `old` and none accepts the parameter `name` that replaces it."""
    if any(accepts(optimizer, new) for optimizer in optimizers):
        return
    ids = {id(p) for p in old}
    for optimizer in optimizers:
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{name}: its shape is {'×'.join(map(str, new.shape))}, but {type(optimizer).__name__} takes matrices "
                "only; pass a second optimizer, such as AdamW, in a list with it, or leave this layer unchanged"
            )


def accepts(optimizer: optim.Optimizer, parameter: Tensor) -> bool:
    """Whether the optimizer can update a parameter of this shape: Muon takes matrices only."""
    return parameter.dim() == 2 or not isinstance(optimizer, optim.Muon)


class _Draft:
    """Groups and state of an optimizer as they are going to be."""

    def __init__(self, optimizer: optim.Optimizer, stream: bool) -> None:
        self.optimizer = optimizer
        self.groups = optimizer.param_groups if stream else [dict(group) for group in optimizer.param_groups]
        self.state: dict[Tensor, State] = optimizer.state if stream else dict(optimizer.state)

    def has(self, parameter: Tensor) -> bool:
        """Whether the parameter is in a group."""
        return any(p is parameter for group in self.groups for p in group["params"])

    def set_state(self, parameter: Tensor, state: State) -> None:
        """Set the state of a new parameter, unless it has gone to another optimizer."""
        if accepts(self.optimizer, parameter):
            self.state[parameter] = state

    def reset_state(self, parameters: Iterable[Tensor]) -> None:
        """Start parameters without state. Adagrad's must exist from its construction on."""
        for p in parameters:
            self.state.pop(p, None)
            if isinstance(self.optimizer, optim.Adagrad):
                start = self.optimizer.defaults["initial_accumulator_value"]
                self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, start)}

    def commit(self, undo: ExitStack) -> None:
        for group, draft in zip(self.optimizer.param_groups, self.groups, strict=True):
            undo.callback(group.update, dict(group))
            group.update({key: draft[key] for key in ("params", "param_names") if key in group})
        if self.state is not self.optimizer.state:
            state = self.optimizer.state
            undo.callback(state.update, dict(state))  # after the next one
            undo.callback(state.clear)
            state.clear()
            state.update(self.state)


def whole(x: Tensor) -> Tensor:
    """The gathered tensor, on every worker, without gradient."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def placed(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a whole tensor with the memory format and the sharding of `like`, which may be on the meta device."""
    device = value.device
    if isinstance(like, DTensor):
        value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return torch.empty_like(like, dtype=dtype, device=device, requires_grad=False).copy_(value)


def state_kinds(state: State) -> dict[str, str]:
    """Return the kind of each state tensor, for `project` and `lift`."""
    # The momentum of RMSprop, which has `square_avg`, is that of normalised gradients.
    return KINDS | {"momentum_buffer": "normalised"} if "square_avg" in state else KINDS


def project(kind: str, M: Tensor, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the state tensors of U and V from the state tensor M (blocks, m, n) of W."""
    if kind == "gradient":
        return M @ V.mT, U.mT @ M
    if kind == "square":
        return M @ V.square().mT, U.square().mT @ M
    assert kind == "normalised"
    norm_U, norm_V = _norms(U, V)
    return M @ (V / norm_V).mT, (U / norm_U).mT @ M


def lift(kind: str, mU: Tensor, mV: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Compute the state tensor M (blocks, m, n) of W whose `project` is closest to (mU, mV)."""
    if kind == "gradient":
        # M = mU V⁺ᵀ + U⁺ᵀ mV, minus the part that both contain.
        right: Tensor = torch.linalg.pinv(V @ V.mT, hermitian=True) @ V
        left: Tensor = U @ torch.linalg.pinv(U.mT @ U, hermitian=True)
        both = (U.mT @ mU + mV @ V.mT) / 2
        return mU @ right + left @ (mV - both @ right)
    if kind == "square":
        # Only the sums over rows and columns are known; the outer product has these sums.
        rows = mU.sum(-1, keepdim=True) / V.square().sum((-2, -1), keepdim=True).clamp_min(1e-30)
        columns = mV.sum(-2, keepdim=True) / U.square().sum((-2, -1), keepdim=True).clamp_min(1e-30)
        mean = (rows.mean(-2, keepdim=True) + columns.mean(-1, keepdim=True)) / 2
        return rows * columns / mean.clamp_min(1e-30)
    assert kind == "normalised"
    norm_U, norm_V = _norms(U, V)
    return lift("gradient", mU * norm_V.mT, mV * norm_U.mT, U, V)


def _norms(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the columns of U (blocks, 1, r) and of the rows of V (blocks, r, 1)."""
    return U.norm(dim=-2, keepdim=True).clamp_min(1e-30), V.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def replace_parameters(groups: list[dict[str, Any]], old: Sequence[Tensor], new: list[Tensor]) -> bool:
    """Put `new` in the place of the first of `old` and remove the others. Returns False if none is present."""
    old_ids = {id(p) for p in old}
    replaced = False
    for group in groups:
        params: list[Tensor] = []
        for p in group["params"]:
            if id(p) not in old_ids:
                params.append(p)
            elif not replaced:
                params += new
                replaced = True
        group["params"] = params
    return replaced
