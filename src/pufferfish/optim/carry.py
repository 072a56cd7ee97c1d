"""Optimizer state carried through a change of parameters: all moments and the step count, or none.

With W = U V the gradients are ∂U = G Vᵀ and ∂V = Uᵀ G. What an optimizer keeps is made of gradients, so it
is carried by the same products; squares by the factors' squares. `Change` lists what became of what.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..layers import Matrix
from ..layers.names import own_name
from .factor_map import Change

State = dict[str, Any]

#: How each tensor that torch's optimizers keep is made of gradients.
_KINDS = {
    "momentum_buffer": "gradient",
    "exp_avg": "gradient",
    "grad_avg": "gradient",
    "exp_avg_sq": "square",
    "max_exp_avg_sq": "square",
    "square_avg": "square",
    "sum": "square",
    "exp_inf": "absolute",
    "acc_delta": "squared update",
}
_NUMBERS = {"step", "mu_product"}
_PROJECTED = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam,
    optim.Adamax, optim.RMSprop, optim.Adagrad, optim.Adadelta,
)  # fmt: skip
_REFUSED = (optim.LBFGS, optim.SparseAdam)

Optimizers = optim.Optimizer | Sequence[optim.Optimizer] | None


def as_list(optimizer: Optimizers) -> list[optim.Optimizer]:
    """The optimizers themselves, without what a trainer may have wrapped around them."""
    if optimizer is None:
        return []
    given = [optimizer] if isinstance(optimizer, optim.Optimizer) else list(optimizer)
    return [_unwrapped(o) for o in given]


def _unwrapped(optimizer: optim.Optimizer) -> optim.Optimizer:
    if not isinstance(optimizer, optim.Optimizer):
        return optimizer  # to be refused: a scheduler has an optimizer too
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, optim.Optimizer) else optimizer


def check(optimizers: Iterable[optim.Optimizer]) -> None:
    """Refuse what cannot follow a change of parameters, before anything is changed."""
    for optimizer in optimizers:
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"optimizer: a {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if isinstance(optimizer, _REFUSED):
            raise TypeError(
                f"{type(optimizer).__name__} cannot follow a change of parameters; "
                "make a new one after factorizing, and pass none here"
            )


class Carrier:
    """Moves parameters and their state inside optimizers, layer by layer; `finish` puts groups in order."""

    def __init__(self, optimizers: list[optim.Optimizer], model: nn.Module, carry: bool = True) -> None:
        self.optimizers = optimizers
        self.model = model
        self.carry = carry  # False: replaced parameters start without state, all of it
        place = {id(p): i for i, p in enumerate(model.parameters())}
        # state_dict() numbers parameters by their place in the group. Where that was the model's order it
        # must be so afterwards, or a checkpoint would load into the wrong parameters.
        self._ordered = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                places = [place.get(id(p), -1) for p in group["params"]]
                if places == sorted(places) and -1 not in places:
                    self._ordered.append(group)
        groups = [
            group for optimizer in optimizers for group in optimizer.param_groups if "param_names" in group
        ]
        self._labels = {id(p): n for g in groups for p, n in zip(g["params"], g["param_names"], strict=True)}
        self._named = groups
        self._reset: set[str] = set()

    def to_factors(self, change: Change) -> None:
        """Dense parameters → their factors and slices."""
        for optimizer in self.optimizers:
            for source, targets in change.parts.items():
                old = change.dense[source]
                news = [change.low_rank[t] for t in targets]
                if not any(new is old for new in news) and swap(optimizer, [old], news):
                    state = optimizer.state.pop(old, {})
                    if self.carry and state and self._can(optimizer, state):
                        for target, carried in factor_state(change, source, state).items():
                            optimizer.state[change.low_rank[target]] = carried
                    else:
                        self._fresh(optimizer, news)

    def to_dense(self, change: Change) -> None:
        """Factors and slices → the dense parameters they stand for."""
        for optimizer in self.optimizers:
            for target, names in change.parts.items():
                new = change.dense[target]
                olds = [change.low_rank[name] for name in names]
                if any(old is new for old in olds) or not swap(optimizer, olds, [new]):
                    continue
                states = {name: optimizer.state.pop(old, {}) for name, old in zip(names, olds, strict=True)}
                if (
                    self.carry
                    and all(states.values())
                    and all(self._can(optimizer, s) for s in states.values())
                ):
                    optimizer.state[new] = dense_state(change, target, states)
                else:
                    self._fresh(optimizer, [new])

    def finish(self, stacklevel: int = 4) -> None:
        place = {id(p): i for i, p in enumerate(self.model.parameters())}
        for group in self._ordered:
            group["params"].sort(key=lambda p: place[id(p)])
        names = self._labels | {id(p): own_name(name) for name, p in self.model.named_parameters()}
        for group in self._named:
            group["param_names"] = [names[id(p)] for p in group["params"]]
        for name in sorted(self._reset):
            warnings.warn(
                f"{name}: the state of replaced parameters was reset; how to carry it is known for "
                + ", ".join(kind.__name__ for kind in _PROJECTED),
                stacklevel=stacklevel,
            )

    def _can(self, optimizer: optim.Optimizer, state: State) -> bool:
        carried = isinstance(optimizer, _PROJECTED) and known(state)
        if not carried:
            self._reset.add(type(optimizer).__name__)
        return carried

    def _fresh(self, optimizer: optim.Optimizer, parameters: list[Tensor]) -> None:
        """No state, except where an optimizer expects it to be there from its construction on."""
        if isinstance(optimizer, optim.Adagrad):
            start = optimizer.defaults["initial_accumulator_value"]
            for p in parameters:
                optimizer.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, start)}


def factor_state(change: Change, source: str, state: State) -> dict[str, State]:
    """The state of one dense parameter, by the low-rank parameters that it becomes."""
    kinds = kinds_of(state)
    state = with_variance(state)
    made: dict[str, State] = {}
    for x in change.matrices:
        factorized = x.name in change.ranks
        if factorized and x.weight == source:
            down, up = change.low_rank[x.down], change.low_rank[x.up]
            U, V = (wide(f.detach()) for f in x.unfold(down, up))
            for key, value in state.items():
                if key in kinds and value is not None:
                    pair = x.fold(*project(kinds[key], wide(x.unroll(value)), U, V))
                else:
                    pair = value, value
                made.setdefault(x.down, {})[key] = _like(down, pair[0], value, key in kinds)
                made.setdefault(x.up, {})[key] = _like(up, pair[1], value, key in kinds)
        for name, rows, target in x.moves(factorized):
            if name == source:
                made[target] = {
                    key: _like(change.low_rank[target], value[rows], value, True)
                    if key in kinds and value is not None
                    else _like(change.low_rank[target], value, value, False)
                    for key, value in state.items()
                }
    return {name: with_square(carried) for name, carried in made.items()}


def dense_state(change: Change, target: str, states: dict[str, State]) -> State:
    """The state of one dense parameter from those of the low-rank parameters it is made of."""
    state: State = {}
    states = {name: with_variance(part) for name, part in states.items()}
    first = next(iter(states.values()))
    kinds = kinds_of(first)
    new = change.dense[target]
    for key, value in first.items():
        if key not in kinds or value is None:
            state[key] = _like(new, value, value, False)
            continue
        whole = torch.zeros_like(new, dtype=value.dtype, requires_grad=False)

        def lifted(x: Matrix, key: str = key) -> Tensor:
            factors = x.unfold(change.low_rank[x.down].detach(), change.low_rank[x.up].detach())
            kept = x.unfold(states[x.down][key], states[x.up][key])
            return lift(kinds[key], *map(wide, kept), *map(wide, factors))

        def moved(part: str, key: str = key) -> Tensor:
            value: Tensor = states[part][key]
            return value

        state[key] = change.assemble(target, whole, lifted, moved)
    return with_square(state)


# Centered RMSprop divides by √(mean square − squared mean). Carried apart, the two could cross; so it is the
# variance that is carried as squares are, and a hair more, or rounding could make it negative.


def with_variance(state: State) -> State:
    mean = state.get("grad_avg")
    if mean is None:
        return state
    return state | {"square_avg": (state["square_avg"] - mean.square()).clamp_min(0)}


def with_square(state: State) -> State:
    mean = state.get("grad_avg")
    if mean is None:
        return state
    hair = 4 * torch.finfo(mean.dtype).eps
    return state | {"square_avg": state["square_avg"] + (1 + hair) * mean.square()}


def kinds_of(state: State) -> dict[str, str]:
    """RMSprop, which has no `acc_delta`, keeps the momentum of gradients already divided by their size."""
    if "square_avg" in state and "acc_delta" not in state:
        return _KINDS | {"momentum_buffer": "normalised"}
    return _KINDS


def known(state: State) -> bool:
    """Whether every part of an optimizer's state for one parameter can be carried."""
    return all(value is None or key in _KINDS or key in _NUMBERS for key, value in state.items())


def project(kind: str, M: Tensor, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """What an optimizer keeps for W (blocks, m, n), as it would keep it for U and for V."""
    if kind == "gradient":
        return M @ V.mT, U.mT @ M
    if kind == "square":
        return M @ V.square().mT, U.square().mT @ M
    if kind == "absolute":  # the size of a sum of terms of random sign
        mU, mV = project("square", M.square(), U, V)
        return mU.sqrt(), mV.sqrt()
    size_U, size_V = _sizes(U, V)
    if kind == "normalised":
        return M @ (V / size_V).mT, (U / size_U).mT @ M
    assert kind == "squared update"
    return M @ (V / size_V / size_V).square().mT, (U / size_U / size_U).square().mT @ M


def lift(kind: str, mU: Tensor, mV: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """The way back: the dense M that would project to (mU, mV), as far as the two agree."""
    if kind == "gradient":
        # M = mU V⁺ᵀ + U⁺ᵀ mV − what both count twice
        right: Tensor = torch.linalg.pinv(V @ V.mT, hermitian=True) @ V
        left: Tensor = U @ torch.linalg.pinv(U.mT @ U, hermitian=True)
        both = (U.mT @ mU + mV @ V.mT) / 2
        return mU @ right + left @ (mV - both @ right)
    if kind == "square":
        # Only the sums over rows and columns are known; the outer product has them.
        rows = mU.sum(-1, keepdim=True) / V.square().sum((-2, -1), keepdim=True).clamp_min(1e-30)
        columns = mV.sum(-2, keepdim=True) / U.square().sum((-2, -1), keepdim=True).clamp_min(1e-30)
        mean = (rows.mean(-2, keepdim=True) + columns.mean(-1, keepdim=True)) / 2
        return rows * columns / mean.clamp_min(1e-30)
    if kind == "absolute":
        return lift("square", mU.square(), mV.square(), U, V).sqrt()
    if kind == "normalised":
        size_U, size_V = _sizes(U, V)
        return lift("gradient", mU * size_V.mT, mV * size_U.mT, U, V)
    assert kind == "squared update"
    return mU @ V.square() + U.square() @ mV  # ΔW = ΔU V + U ΔV


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sizes(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of U's columns (blocks, 1, r) and V's rows (blocks, r, 1)."""
    return U.norm(dim=-2, keepdim=True).clamp_min(1e-30), V.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def swap(optimizer: optim.Optimizer, olds: list[Tensor], news: list[Tensor]) -> bool:
    """Put `news` where the first of `olds` stood, drop the others. False if none of them is here."""
    gone = {id(p) for p in olds}
    done = False
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        for p in group["params"]:
            if id(p) not in gone:
                params.append(p)
            elif not done:
                params += news
                done = True
        group["params"] = params
    return done


def _like(parameter: Tensor, value: Any, old: Any, tensor: bool) -> Any:
    """A carried value: tensors get the parameter's shape, device and memory format, numbers are copied."""
    if tensor and isinstance(value, Tensor):
        return torch.empty_like(parameter, dtype=old.dtype, requires_grad=False).copy_(value)
    return value.clone() if isinstance(value, Tensor) else value
