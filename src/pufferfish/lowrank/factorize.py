"""`factorize_`, `reshape_`, `merge_`: a model made low-rank and dense again, in place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layers import LowRank, hollow, low_rank_type
from ..layers.base import CALL_HOOKS
from ..layers.names import named_modules, own_name, unwrap
from ..optim.carry import Carrier, Optimizers, as_list, check
from ..optim.factor_map import Change, multiplied
from ..planning import svd
from ..planning.plan import Entry, Plan
from ..planning.planner import plan, resolve
from .checks import fit, refuse_hooks, refuse_wrapped, replaced

#: Gives down.weight, up.weight and the relative error for one matrix of one dense layer.
Fill = Callable[[Entry, Tensor], tuple[Tensor, Tensor, float | None]]


def factorize_(model: nn.Module, plan: Plan, optimizer: Optimizers = None) -> Plan:
    """Replace the planned layers by low-rank ones through a truncated SVD, in place.

    Everything that can fail is checked for all layers first, so that an error leaves the model as it
    was. Then layer by layer: factor, replace, free. On a freshly initialised model this is spectral
    initialisation, the way to start low-rank without a warm-up.

    Args:
        model: the plain model. Factorize before DDP or `torch.compile` wrap it.
        plan: from `pufferfish.plan`. Rules in it are answered from the weights as they are now.
        optimizer: one or several, whose groups and state follow the parameters.

    Returns:
        The plan with all ranks, and each layer's relative error ‖W − UV‖ / ‖W‖.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> done = pf.factorize_(model, pf.plan(model, rank=0.25))
    >>> model[0]
    LowRankLinear(
      rank=16
      (down): Linear(in_features=64, out_features=16, bias=False)
      (up): Linear(in_features=16, out_features=64, bias=True)
    )
    """

    refuse_wrapped(model, "factorize_")
    fit(model, plan, finite=True)
    return convert(model, resolve(plan, model), optimizer, by_svd)


def by_svd(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """The factors of one matrix; on the meta device only their shapes."""
    assert e.matrix is not None
    assert e.rank is not None
    if weight.is_meta:
        return *empty_factors(e, weight), None
    U, V, error = svd.split(e.matrix.unroll(weight.detach()), e.rank)
    return *e.matrix.fold(U, V), error


def by_nan(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors to be loaded later: NaN until then."""
    down, up = empty_factors(e, weight)
    return down.fill_(float("nan")), up.fill_(float("nan")), e.error


def reshape_(model: nn.Module, plan: Plan, optimizer: Optimizers = None) -> Plan:
    """Give a freshly built dense model the low-rank structure, without any SVD, in place.

    For `load_state_dict` of a checkpoint that was saved after the switch. The factors hold NaN until
    something is loaded, so that forgetting it cannot go unseen. Works on the meta device.

    >>> import pufferfish as pf
    >>> build = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> trained = build()
    >>> done = pf.factorize_(trained, pf.plan(trained, rank=0.25))
    >>> fresh = build()
    >>> _ = pf.reshape_(fresh, done)
    >>> fresh.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    """
    refuse_wrapped(model, "reshape_")
    if not plan.resolved:
        waiting = next(e.name for e in plan.entries if e.rule is not None)
        raise ValueError(
            f"{waiting}: the plan still holds a rule here, not a rank; give the plan that factorize_ returned"
        )
    fit(model, plan)
    return convert(model, plan, optimizer, by_nan)


def merge_(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Multiply the factors out: every low-rank layer becomes its dense layer again, in place.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model))
    >>> pf.merge_(model)
    >>> model
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
    )
    """
    refuse_wrapped(model, "merge_")
    multiply_out(model, optimizer)


def multiply_out(model: nn.Module, optimizer: Optimizers, carry: bool = True) -> None:
    """`merge_` for a model that may be compiled; what wraps it is the caller's affair."""
    paths: list[str] = []
    for name, path, module in named_modules(model):
        if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in paths):
            if path == "":
                raise ValueError("the model itself is the low-rank layer; put it into an nn.Sequential")
            dense = module._dense[0]
            _, gone = replaced(type(module).matrices(dense), module.ranks, dense)
            refuse_hooks(name, module, gone)
            paths.append(path)
    optimizers = as_list(optimizer)
    check(optimizers)
    carrier = Carrier(optimizers, model, carry)
    for path in paths:  # no reference to a replaced layer outlives its turn
        low_rank = model.get_submodule(path)
        assert isinstance(low_rank, LowRank)
        dense = copy.deepcopy(low_rank._dense[0])
        matrices = type(low_rank).matrices(dense)
        change = Change(own_name(path), matrices, low_rank.ranks, {}, dict(low_rank.named_parameters()))
        for name, meta in list(dense.named_parameters()):
            change.dense[name] = _dense_parameter(name, meta, change)
            set_parameter(dense, name, change.dense[name])
        if isinstance(dense, nn.RNNBase):
            dense.flatten_parameters()
        carrier.to_dense(change)
        _replace(model, path, low_rank, dense)
    carrier.finish()


def ranks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Layer → matrix → rank, of every low-rank layer."""
    return {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}


def plan_of(model: nn.Module) -> Plan:
    """The plan that would make a dense model what this one is now: the ranks of its low-rank layers.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8, keep=["1"]))
    >>> pf.plan_of(model).ranks
    {'0': {'': 8}}
    """
    ranks = ranks_of(model)
    dense = hollow(unwrap(model))
    merge_(dense)
    made = plan(dense, multiple=1)
    entries = []
    for e in made.entries:
        rank = ranks.get(e.layer, {}).get(e.matrix.name) if e.matrix else None
        reason = e.reason if e.matrix is None else "not factorized"
        entries.append(e.ranked(rank) if rank else e.stays(reason))
    return made.replace(entries)


def convert(model: nn.Module, plan: Plan, optimizer: Optimizers, fill: Fill, carry: bool = True) -> Plan:
    """Second pass: layer by layer, once everything that can fail has not."""
    optimizers = as_list(optimizer)
    check(optimizers)
    carrier = Carrier(optimizers, model, carry)
    paths = {name: path for name, path, _ in named_modules(model)}
    # The structures cost nothing (meta tensors) and come first: a user's own layer type may refuse.
    structures = {layer: _structure(model.get_submodule(paths[layer]), r) for layer, r in plan.ranks.items()}
    errors: dict[str, float | None] = {}
    for layer, low_rank in structures.items():
        dense, ranks = model.get_submodule(paths[layer]), low_rank.ranks
        change = Change(layer, low_rank.matrices(dense), ranks, dict(dense.named_parameters()), {})
        for e in (e for e in plan.entries if e.layer == layer and e.rank is not None):
            assert e.matrix is not None
            weight = change.dense[e.matrix.weight]
            down, up, errors[e.name] = fill(e, weight)
            for name, value in ((e.matrix.down, down), (e.matrix.up, up)):
                change.low_rank[name] = _parameter(value, weight)
        for x in change.matrices:
            for source, rows, target in x.moves(x.name in ranks):
                old = change.dense[source]
                whole = (rows.start, rows.stop) == (0, len(old))
                change.low_rank[target] = old if whole else _parameter(old.detach()[rows].clone(), old)
        for name, _ in list(low_rank.named_parameters()):
            # What no matrix names (a recurrent layer's biases …) is carried over under its own name.
            if name not in change.low_rank:
                change.low_rank[name] = change.dense[name]
            set_parameter(low_rank, name, change.low_rank[name])
        carrier.to_factors(change)
        _replace(model, paths[layer], dense, low_rank)
    carrier.finish()
    return plan.replace(
        dataclasses.replace(e, error=errors[e.name]) if e.name in errors else e for e in plan.entries
    )


def _structure(dense: nn.Module, ranks: dict[str, int]) -> LowRank:
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind(dense, ranks)


def empty_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert e.matrix is not None
    assert e.rank is not None
    x = e.matrix
    U = weight.new_empty(x.blocks, x.m, e.rank, requires_grad=False)
    V = weight.new_empty(x.blocks, e.rank, x.n, requires_grad=False)
    return x.fold(U, V)


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """`value` as a parameter with the dtype, memory format, flags and attributes of `like`."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)
    # Strides tell: a 1 × 1 convolution's weight is contiguous in both orders, its gradient is not.
    if (
        like.dim() != value.dim()
        or like.stride() != torch.empty_like(like, device="meta", memory_format=order).stride()
    ):
        order = torch.contiguous_format
    return _with_flags(torch.empty_like(value, dtype=like.dtype, memory_format=order).copy_(value), like)


def _with_flags(value: Tensor, like: Tensor) -> nn.Parameter:
    made = nn.Parameter(value, like.requires_grad)
    vars(made).update(vars(like))
    return made


def _dense_parameter(name: str, meta: Tensor, change: Change) -> Tensor:
    """One dense parameter from the factors, slices and unchanged parameters of a low-rank layer."""
    parts = [change.low_rank[part] for part in change.parts.get(name, [name])]
    if len(parts) == 1:
        return parts[0]  # unchanged or only renamed: the very same parameter
    whole = torch.empty_like(meta, device=parts[0].device, dtype=parts[0].dtype)
    with torch.no_grad():
        change.assemble(
            name,
            whole,
            lambda x: multiplied(x, change.low_rank[x.down], change.low_rank[x.up]),
            lambda part: change.low_rank[part],
        )
    return _with_flags(whole, parts[-1])  # in the dense weight's memory format, which `meta` remembers


def set_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _replace(model: nn.Module, path: str, old: nn.Module, new: nn.Module) -> None:
    """Put `new` where `old` was, with its mode and hooks."""
    new.train(old.training)
    for hooks in CALL_HOOKS:
        if hooks in vars(old):
            vars(new)[hooks] = vars(old)[hooks]
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)
