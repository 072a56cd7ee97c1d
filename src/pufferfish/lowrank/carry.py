"""`Carrier`: carry optimizer state from dense parameters to factors and back; if a part of it is unknown, all of it is reset.

With W = U V the gradients are ∂U = G Vᵀ and ∂V = Uᵀ G. Optimizer state is computed from gradients, so it is
carried by the same products, and squares by products with the squared factors.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from ..layers import FactorMap, Part
from ..layers.matrix import at_least_fp32
from .optimizers import CARRIED, KINDS, SUPPORTED, State, can_carry, type_name


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
        optimizers: list[optim.Optimizer],
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
        if self.carries(home, state):
            for target, carried in split_state(
                factor_map, name, state, new, new if factors is None else factors
            ).items():
                home.set_state(new[target], carried)
        else:
            home.reset_state(new.values())

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
        if all(states.values()) and all(self.carries(home, state) for state in states.values()):
            home.set_state(
                new, join_state(factor_map, name, states, new, old if factors is None else factors)
            )
        else:
            home.reset_state([new])

    def replace(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> "_Draft | None":
        """Put `new` in the place of the first of `old` that an optimizer has, and remove the others of `old`.

        Returns:
            The draft of the optimizer that had it, with its state; None if no optimizer has one of `old`.
        """
        holders = [draft for draft in self._drafts if draft.has(old)]
        if not holders:
            return None
        holders.sort(key=lambda draft: next(i for i, p in enumerate(old) if draft.has([p])))
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
        """Assign groups and state.

        Args:
            parameters: of the changed model, by their own names, in its order.
        """
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

    def has(self, parameters: Sequence[Tensor]) -> bool:
        """Whether at least one of the parameters is in a group."""
        own = {id(p) for group in self.groups for p in group["params"]}
        return any(id(p) in own for p in parameters)

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


def split_state(
    factor_map: FactorMap, name: str, state: State, new: Mapping[str, Tensor], factors: Mapping[str, Tensor]
) -> dict[str, State]:
    """Compute the states of the low-rank parameters `new`, by name, that replace the dense parameter `name`.

    Empties `state`: of a sharded model, one tensor is gathered at a time, and its shard is freed.
    """
    kinds = state_kinds(state)
    states: dict[str, State] = {target: {} for target in new}
    for key in list(state):
        value = state.pop(key)
        if key not in kinds or value is None:
            for carried in states.values():
                carried[key] = value.clone() if isinstance(value, Tensor) else value
            continue

        def projected(part: Part, M: Tensor, kind: str = kinds[key]) -> tuple[Tensor, Tensor]:
            U, V = (at_least_fp32(x.detach()) for x in part.factors(factors.__getitem__))
            return project(kind, at_least_fp32(M), U, V)

        value, dtype = whole(value), value.dtype
        for target, piece in factor_map.split(name, value, projected):
            states[target][key] = placed(piece, new[target], dtype)
        del value, piece
    return states


def join_state(
    factor_map: FactorMap, name: str, states: Mapping[str, State], new: Tensor, factors: Mapping[str, Tensor]
) -> State:
    """Compute the state of the dense parameter `name` from those of the low-rank ones, by name."""
    first = next(iter(states.values()))
    kinds, state = state_kinds(first), {}
    for key, value in first.items():
        if key not in kinds or value is None:
            state[key] = value.clone() if isinstance(value, Tensor) else value
            continue

        def lifted(part: Part, mU: Tensor, mV: Tensor, kind: str = kinds[key]) -> Tensor:
            U, V = (at_least_fp32(x.detach()) for x in part.factors(factors.__getitem__))
            return lift(kind, at_least_fp32(mU), at_least_fp32(mV), U, V)

        moments = {target: part[key] for target, part in states.items()}
        out = torch.zeros_like(new, dtype=value.dtype, device=value.device, requires_grad=False)
        state[key] = factor_map.join(name, moments.__getitem__, lifted, out)
    return state


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
