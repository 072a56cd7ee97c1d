"""`factorize_`, `reshape_`, `merge_`: a model made low-rank and dense again, in place."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from . import svd
from .candidates import unfit
from .layers import LowRank, Matrix, hollow, low_rank_type
from .layers.base import CALL_HOOKS
from .names import named_modules, own_name, unwrap
from .optim import Carrier, Change, Optimizers, as_list, check
from .plan import Entry, Plan
from .planning import check_values, plan, resolve

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

    def by_svd(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
        assert e.matrix is not None
        assert e.rank is not None
        if weight.is_meta:
            return *_empty(e, weight), None
        U, V, error = svd.split(e.matrix.unroll(weight.detach()), e.rank)
        return *e.matrix.fold(U, V), error

    _refuse_wrapped(model, "factorize_")
    _fit(model, plan, finite=True)
    return _convert(model, resolve(plan, model), optimizer, by_svd)


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

    def by_nan(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
        down, up = _empty(e, weight)
        return down.fill_(float("nan")), up.fill_(float("nan")), e.error

    _refuse_wrapped(model, "reshape_")
    if not plan.resolved:
        waiting = next(e.name for e in plan.entries if e.rule is not None)
        raise ValueError(
            f"{waiting}: the plan still holds a rule here, not a rank; give the plan that factorize_ returned"
        )
    _fit(model, plan)
    return _convert(model, plan, optimizer, by_nan)


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
    _refuse_wrapped(model, "merge_")
    paths: list[str] = []
    for name, path, module in named_modules(model):
        if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in paths):
            if path == "":
                raise ValueError("the model itself is the low-rank layer; put it into an nn.Sequential")
            dense = module._dense[0]
            _, gone = _replaced(type(module).matrices(dense), module.ranks, dense)
            _refuse_hooks(name, module, gone)
            paths.append(path)
    optimizers = as_list(optimizer)
    check(optimizers)
    carrier = Carrier(optimizers, model)
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
    carrier.finish(stacklevel=3)


def plan_of(model: nn.Module) -> Plan:
    """The plan that would make a dense model what this one is now: the ranks of its low-rank layers.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8, keep=["1"]))
    >>> pf.plan_of(model).ranks
    {'0': {'': 8}}
    """
    ranks = {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}
    dense = hollow(unwrap(model))
    merge_(dense)
    made = plan(dense, multiple=1)
    entries = []
    for e in made.entries:
        rank = ranks.get(e.layer, {}).get(e.matrix.name) if e.matrix else None
        reason = e.reason if e.matrix is None else "not factorized"
        entries.append(e.ranked(rank) if rank else e.stays(reason))
    return made.replace(entries)


def _refuse_wrapped(model: nn.Module, verb: str) -> None:
    if unwrap(model) is not model:
        raise ValueError(
            f"{verb}: this is a {type(model).__name__} around the model; apply it to the model inside, "
            "then wrap that (a running job: pufferfish.Switch)"
        )
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(
                f"{verb}: {type(module).__name__} is compiled already; compile after this, not before"
            )


def _fit(model: nn.Module, plan: Plan, finite: bool = False) -> None:
    """First pass: check everything that can fail, for all layers. Changes nothing and holds on to nothing."""
    layers = {name: module for name, _, module in named_modules(model)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: dict[str, list[str]] = {}
    for e in plan.entries:
        if e.matrix is None:
            continue
        module = layers.get(e.layer)
        if module is None:
            raise ValueError(f"{e.name}: the plan has this layer, the model does not")
        if type(module).__name__ != e.type:
            hint = "; it is low-rank already" if isinstance(module, LowRank) else ""
            raise ValueError(
                f"{e.name}: the plan is for a {e.type}, the model has a {type(module).__name__}{hint}"
            )
        kind = low_rank_type(type(module))
        if kind is None:
            raise ValueError(
                f"{e.name}: no low-rank form is registered for {e.type}; call pufferfish.register first"
            )
        if reason := unfit(module):
            raise ValueError(f"{e.name}: {reason}")
        now = {x.name: x for x in kind.matrices(module)}.get(e.matrix.name)
        if now != e.matrix:
            raise ValueError(f"{e.name}: the plan is for {_text(e.matrix)}, the model has {_text(now)}")
        if e.rank is None and e.rule is None:
            continue
        if finite and not (weight := module.get_parameter(e.matrix.weight)).is_meta:
            check_values(e.name, weight)
        if e.layer == "":
            raise ValueError("the model itself is the layer to replace; put it into an nn.Sequential")
        chosen.setdefault(e.layer, []).append(e.matrix.name)
    for layer, names in chosen.items():
        module = layers[layer]
        kind = low_rank_type(type(module))
        assert kind is not None
        gone, _ = _replaced(kind.matrices(module), names, module)
        for name in gone:
            parameter = module.get_parameter(name)
            if uses[id(parameter)] > 1:
                raise ValueError(f"{layer}: its {name} is shared with another layer of this model")
            if type(parameter.data) is not Tensor:
                raise ValueError(
                    f"{layer}: its {name} is a {type(parameter.data).__name__}, not a plain tensor"
                )
        _refuse_hooks(layer, module, gone)


def _text(matrix: Matrix | None) -> str:
    if matrix is None:
        return "no such weight"
    blocks = f" in {matrix.blocks} blocks" if matrix.blocks > 1 else ""
    return f"a weight of {'×'.join(map(str, matrix.shape))}{blocks} with{'out' * (not matrix.bias)} a bias"


def _replaced(
    matrices: list[Matrix], names: Collection[str], dense: nn.Module
) -> tuple[list[str], list[str]]:
    """The parameters, of the dense layer and of the low-rank one, that are no longer the same afterwards."""
    gone: tuple[list[str], list[str]] = ([], [])
    for x in matrices:
        pieces = [(x.weight, x.down), (x.weight, x.up)] if x.name in names else []
        for source, rows, target in x.moves(x.name in names):
            if (rows.start, rows.stop) != (0, len(dense.get_parameter(source))):
                pieces.append((source, target))
        for dense_name, low_rank_name in pieces:
            gone[0].append(dense_name)
            gone[1].append(low_rank_name)
    return gone


def _refuse_hooks(name: str, module: nn.Module, gone: list[str]) -> None:
    """Hooks that see parameters or state dicts mean something else once the parameters are others."""
    for child in module.modules():
        for hooks, value in vars(child).items():
            if not ("_hooks" in hooks and value and hooks not in CALL_HOOKS):
                continue
            raise ValueError(
                f"{name}: it has hooks ({hooks.strip('_')}) that cannot be carried over; remove them"
            )
        if child is not module and any(getattr(child, hooks, None) for hooks in CALL_HOOKS):
            raise ValueError(f"{name}: there are hooks inside it that cannot be carried over; remove them")
    for label in gone:
        parameter = module.get_parameter(label)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name}.{label}: it has gradient hooks that cannot be carried over; remove them"
            )


def _convert(model: nn.Module, plan: Plan, optimizer: Optimizers, fill: Fill) -> Plan:
    """Second pass: nothing here fails on bad input any more."""
    optimizers = as_list(optimizer)
    check(optimizers)
    carrier = Carrier(optimizers, model)
    paths = {name: path for name, path, _ in named_modules(model)}
    by_layer: dict[str, list[Entry]] = {}
    for e in plan.entries:
        if e.rank is not None:
            by_layer.setdefault(e.layer, []).append(e)
    errors: dict[str, float | None] = {}
    for layer, entries in by_layer.items():
        dense = model.get_submodule(paths[layer])
        kind = low_rank_type(type(dense))
        assert kind is not None
        ranks = {e.matrix.name: e.rank for e in entries if e.matrix and e.rank}
        low_rank = kind(dense, ranks)
        change = Change(layer, kind.matrices(dense), ranks, dict(dense.named_parameters()), {})
        for e in entries:
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


def _empty(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert e.matrix is not None
    assert e.rank is not None
    x = e.matrix
    U = weight.new_empty(x.blocks, x.m, e.rank, requires_grad=False)
    V = weight.new_empty(x.blocks, e.rank, x.n, requires_grad=False)
    return x.fold(U, V)


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """`value` as a parameter with the dtype, memory format, flags and attributes of `like`."""
    value = value.to(like.dtype).contiguous()
    if like.dim() == value.dim() and not like.is_contiguous():
        for order in (torch.channels_last, torch.channels_last_3d):
            if like.dim() == (4 if order is torch.channels_last else 5) and like.is_contiguous(
                memory_format=order
            ):
                value = value.contiguous(memory_format=order)
    made = nn.Parameter(value, like.requires_grad)
    vars(made).update(vars(like))
    return made


def _dense_parameter(name: str, meta: Tensor, change: Change) -> Tensor:
    """One dense parameter from the factors, slices and unchanged parameters of a low-rank layer."""
    pieces: list[tuple[slice, Tensor, Tensor]] = []
    moved: list[tuple[slice, Tensor, Tensor]] = []
    for x in change.matrices:
        factorized = x.name in change.ranks
        if factorized and x.weight == name:
            down, up = change.low_rank[x.down], change.low_rank[x.up]
            wide = torch.float64 if up.dtype == torch.float64 else torch.float32
            pieces.append((x.rows, x.product(down.detach().to(wide), up.detach().to(wide)), up))
        moved += [
            (rows, change.low_rank[target].detach(), change.low_rank[target])
            for source, rows, target in x.moves(factorized)
            if source == name
        ]
    pieces += moved
    if not pieces:
        return change.low_rank[name]
    like = pieces[0][-1]
    if len(moved) == len(pieces) == 1 and like.shape == meta.shape:
        return like  # only renamed: the very same parameter
    whole = torch.empty_like(meta, device=like.device, dtype=like.dtype)
    for rows, value, _ in pieces:
        whole[rows] = value.to(like.dtype)
    made = nn.Parameter(whole, like.requires_grad)
    vars(made).update(vars(like))
    return made


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
