"""`factorize_`, `reshape_` and `merge_`: make a model low-rank, and dense again, in place."""

import copy
import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import FactorMap, LowRank, LowRankLinear, SharedInput, low_rank_type, matrices_of
from ..layers.base import CALL_HOOKS
from ..layers.names import named_modules, unwrap
from ..optim.carry import Carrier, Optimizers, as_list, check_optimizers, warn_of_stacks
from ..planning import svd
from ..planning.plan import Entry, Plan, check_is_plan
from ..planning.planner import resolve
from ..planning.progress import track
from .checks import (
    check_hooks,
    check_layer_accepted,
    check_not_sharded,
    check_plan,
    check_unwrapped,
    factorized_weights,
    find_compiled,
    replaced_parameters,
    warn_of_other_optimizers,
)

#: Returns down.weight, up.weight and the relative error (None: unknown) of one matrix, given its dense parameter.
Fill = Callable[[Entry, Tensor], tuple[Tensor, Tensor, float | None]]

#: Share of ‖W‖² that the factors of a trained model must keep for it to work as before: rounding to 4 bits, which trained
#: models survive, has a relative error of about 0.1 too.
_KEPT = 0.99
_REMEDY = "pass it as optimizer=, or create it afterwards"


def factorize_(model: nn.Module, plan: Plan, optimizer: Optimizers = None) -> Plan:
    """Replace the planned layers by low-rank ones through a truncated SVD, in place.

    All layers are checked before the first one is replaced, so an error leaves the model unchanged. Dense weights
    are freed layer by layer. On a newly initialized model this is spectral initialization, for low-rank training
    without a warm-up. A trained model must be trained further: a warning says so where the factors keep too little.

    Args:
        model: Model without wrappers: factorize it before DDP and `torch.compile`.
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the current weights.
        optimizer: One or several. Their parameter groups and states are updated. New parameters go into the
            group of the old one; those that Muon does not accept (stacks of factors, as in recurrent layers) go to another
            optimizer.

    Returns:
        The plan with all ranks and with the relative error ‖W − UV‖ / ‖W‖ of each layer, which `print` shows.

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
    check_unwrapped(model, "factorize_")
    check_is_plan(plan, "factorize_")
    check_plan(model, plan, finite=True)
    plan = resolve(plan, model)
    plan.warn_if_little_changes()
    warn_of_other_optimizers(model, plan, as_list(optimizer), _REMEDY)
    warn_of_stacks(as_list(optimizer), factorized_weights(model, plan), stacklevel=2)
    # An optimizer with state goes on with a run that knows its loss; plain SGD keeps none.
    continues = any(x.state or x.defaults.get("momentum") == 0 for x in as_list(optimizer))
    done = replace_layers_(model, plan, optimizer, svd_factors)
    kept = [1 - e.error**2 for e in done if e.error is not None]
    if kept and sum(kept) < _KEPT * len(kept) and not continues and _is_trained(model):
        warnings.warn(
            f"factorize_: the factors keep {sum(kept) / len(kept):.1%} of the energy ‖W‖² on average, too little for this "
            "trained model to work as before: evaluate it, and train it further before you use it; print(plan) of the "
            "returned plan shows the error of each layer",
            stacklevel=2,
        )
    return done


def _is_trained(model: nn.Module) -> bool:
    """Whether the scales of a normalization layer differ from each other: all start equal."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    known = [p for p in weights if not (is_lazy(p) or p.is_meta)]
    return any(p.dim() == 1 and bool((p != p[:1]).any()) for p in known)


def svd_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors of one matrix by truncated SVD, and the relative error; without values on the meta device."""
    assert e.matrix is not None
    assert e.rank is not None
    if weight.is_meta:
        return *empty_factors(e, weight), None
    U, V, error = svd.split(e.matrix.to_matrix(weight.detach()), e.rank)
    return *e.matrix.from_factors(U, V), error


def nan_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors filled with NaN, to be loaded later."""
    down, up = empty_factors(e, weight)
    return down.fill_(float("nan")), up.fill_(float("nan")), e.error


def reshape_(model: nn.Module, plan: Plan, optimizer: Optimizers = None) -> Plan:
    """Give a newly built dense model the low-rank structure of a plan, in place, without an SVD.

    Use it before `load_state_dict` with a checkpoint of a low-rank model. The factors are NaN until they are
    loaded, so a missing load is noticed. Works on the meta device.

    Args:
        model: Model without wrappers.
        plan: With all ranks, as returned by `factorize_`.
        optimizer: One or several. Their parameter groups are updated.

    >>> import pufferfish as pf
    >>> build = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> trained = build()
    >>> done = pf.factorize_(trained, pf.plan(trained, rank=0.25))
    >>> fresh = build()
    >>> _ = pf.reshape_(fresh, done)
    >>> fresh.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    """
    check_unwrapped(model, "reshape_")
    check_is_plan(plan, "reshape_")
    if not plan.resolved:
        unresolved = next(e.name for e in plan.entries if e.rule is not None)
        raise ValueError(
            f"{unresolved}: the plan has a rule instead of a rank; pass the plan that factorize_ returned"
        )
    check_plan(model, plan)
    warn_of_other_optimizers(model, plan, as_list(optimizer), _REMEDY)
    return replace_layers_(model, plan, optimizer, nan_factors)


def merge_(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Replace every low-rank layer by the dense layer with the product of its factors, in place.

    Args:
        model: Plain, DDP or compiled. To continue training under DDP, call it on every worker.
        optimizer: One or several. Their parameter groups and states are updated.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model))
    >>> pf.merge_(model)
    >>> model
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
    )
    """
    if unwrap(model) is model and find_compiled(model) is None:
        merge_layers_(model, optimizer)
        return
    from ..distributed.job import Job, check_rewrap  # wrappers are the concern of a package below this one

    job = Job(model)
    if job.ddp is not None:
        check_rewrap(job.ddp, {})
    merge_layers_(job.inner, optimizer)
    job.rewrap({})


def merge_layers_(model: nn.Module, optimizer: Optimizers, carry: bool = True) -> None:
    """`merge_` for the inner model of a wrapper, which the caller updates.

    Args:
        carry: whether optimizer state is carried over to the new parameters, or dropped.
    """
    optimizers = as_list(optimizer)
    check_optimizers(optimizers)
    check_not_sharded(model, "merge_")
    paths: list[str] = []
    for name, path, module in named_modules(model):
        if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in paths):
            if path == "":
                raise ValueError("the model itself is the low-rank layer; wrap it in an nn.Sequential")
            dense = module._dense[0]
            _, replaced = replaced_parameters(
                matrices_of(type(module), dense, module.ranks), module.ranks, dense
            )
            check_hooks(name, module, replaced)
            check_layer_accepted(name, module, dense, optimizers, back=True)
            paths.append(path)
    carrier = Carrier(optimizers, model, carry)
    for path in paths:  # keep no reference to a replaced layer, so that it is freed at once
        low_rank = model.get_submodule(path)
        assert isinstance(low_rank, LowRank)
        attributes = {id(x): x for k, x in vars(low_rank._dense[0]).items() if not k.startswith("_")}
        dense = copy.deepcopy(low_rank._dense[0], attributes)  # these stay the same objects
        for name in vars(dense).keys() & vars(low_rank).keys():
            if not name.startswith("_"):  # dropout, training, …, which may have been set since then
                setattr(dense, name, getattr(low_rank, name))
        matrices = matrices_of(type(low_rank), dense, low_rank.ranks)
        mapping = FactorMap(matrices, low_rank.ranks, {}, dict(low_rank.named_parameters()))
        for name, meta in list(dense.named_parameters()):
            mapping.dense[name] = _dense_parameter(name, meta, mapping)
            set_parameter(dense, name, mapping.dense[name])
        if isinstance(dense, nn.RNNBase):
            dense.flatten_parameters()
        carrier.to_dense(mapping)
        _replace(model, path, low_rank, dense)
    carrier.finish()


def ranks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Ranks of all low-rank layers, by layer and matrix name."""
    return {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}


def replace_layers_(
    model: nn.Module, plan: Plan, optimizer: Optimizers, fill: Fill, carry: bool = True
) -> Plan:
    """Replace dense layers by low-rank ones, after `check_plan`.

    Args:
        plan: with all ranks.
        fill: gives the factors of each matrix.
        carry: whether optimizer state is carried over to the factors, or dropped.

    Returns:
        The plan with the errors that `fill` returned.
    """
    optimizers = as_list(optimizer)
    check_optimizers(optimizers)
    carrier = Carrier(optimizers, model, carry)
    paths = {name: path for name, path, _ in named_modules(model)}
    # All structures first, on the meta device: the constructor of a registered layer type may raise.
    structures = {layer: _structure(model.get_submodule(paths[layer]), r) for layer, r in plan.ranks.items()}
    for layer, low_rank in structures.items():
        check_layer_accepted(layer, low_rank, model.get_submodule(paths[layer]), optimizers)
    errors: dict[str, float | None] = {}
    for layer, low_rank in track(structures.items(), "factorizing layers"):
        dense, ranks = model.get_submodule(paths[layer]), low_rank.ranks
        mapping = FactorMap(
            matrices_of(type(low_rank), dense, ranks), ranks, dict(dense.named_parameters()), {}
        )
        for e in (e for e in plan.entries if e.layer == layer and e.rank is not None):
            assert e.matrix is not None
            weight = mapping.dense[e.matrix.weight]
            down, up, errors[e.name] = fill(e, weight)
            if e.fused and isinstance(low_rank, LowRankLinear):
                low_rank._fused = True
            for name, value in ((e.matrix.down, down), (e.matrix.up, up)):
                mapping.low_rank[name] = _parameter(value, weight)
        for x in mapping.matrices:
            for source, index, target in x.copied_slices(x.name in ranks):
                old = mapping.dense[source]
                part = old.detach()[index]
                mapping.low_rank[target] = old if part.shape == old.shape else _parameter(part, old)
        for name, _ in list(low_rank.named_parameters()):
            # Parameters of no matrix, such as the biases of a recurrent layer, keep their names.
            if name not in mapping.low_rank:
                mapping.low_rank[name] = mapping.dense[name]
            set_parameter(low_rank, name, mapping.low_rank[name])
        carrier.to_factors(mapping)
        _replace(model, paths[layer], dense, low_rank)
    carrier.finish()
    for names in plan.shared_inputs:
        layers = [x for x in map(structures.get, names) if isinstance(x, LowRankLinear)]
        if len(layers) > 1:
            SharedInput(layers)
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(
        kind.__module__.startswith("transformers.") for kind in kinds
    ):  # a model of transformers, or a part of one
        from ..integrations import pretrained  # noqa: F401  # extends the save_pretrained of its models
    return plan.replace(
        dataclasses.replace(e, error=errors[e.name]) if e.name in errors else e for e in plan.entries
    )


def _structure(dense: nn.Module, ranks: dict[str, int]) -> LowRank:
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind(dense, ranks)


def empty_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized factors with the dtype and device of `weight`."""
    assert e.matrix is not None
    assert e.rank is not None
    x = e.matrix
    U = weight.new_empty(x.blocks, x.m, e.rank, requires_grad=False)
    V = weight.new_empty(x.blocks, e.rank, x.n, requires_grad=False)
    return x.from_factors(U, V)


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with the values of `value` and the dtype, memory format, flags and attributes of `like`."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)
    # Compare strides: the weight of a 1 × 1 convolution is contiguous in both formats, but its gradient is not.
    if (
        like.dim() != value.dim()
        or like.stride() != torch.empty_like(like, device="meta", memory_format=order).stride()
    ):
        order = torch.contiguous_format
    return _with_flags(torch.empty_like(value, dtype=like.dtype, memory_format=order).copy_(value), like)


def _with_flags(value: Tensor, like: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, like.requires_grad)
    vars(parameter).update(vars(like))
    return parameter


def _dense_parameter(name: str, meta: Tensor, mapping: FactorMap) -> Tensor:
    """One dense parameter, computed from the parameters of a low-rank layer."""
    parts = [mapping.low_rank[part] for part in mapping.targets.get(name, [name])]
    if len(parts) == 1:
        return parts[0]  # unchanged or only renamed: the same object
    whole = torch.empty_like(meta, device=parts[0].device, dtype=parts[0].dtype)
    with torch.no_grad():
        mapping.assemble(
            name,
            whole,
            lambda x: x.product_fp32(mapping.low_rank[x.down], mapping.low_rank[x.up]),
            lambda part: mapping.low_rank[part],
        )
    return _with_flags(whole, parts[-1])  # in the memory format of `meta`


def set_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Assign a parameter by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _replace(model: nn.Module, path: str, old: nn.Module, new: nn.Module) -> None:
    """Replace a submodule, and copy its training mode and call hooks to the new one."""
    new.train(old.training)
    for hooks in CALL_HOOKS:
        if hooks in vars(old):
            vars(new)[hooks] = vars(old)[hooks]
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)
