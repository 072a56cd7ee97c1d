"""`factorize_`, `reshape_` and `merge_`: make a model low-rank, and dense again, in place; `plan_of` a low-rank model."""

import dataclasses
import warnings
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..distributed.ddp import Job, check_rewrap, find_ddp
from ..distributed.workers import Workers
from ..layers import (
    LowRank,
    LowRankEmbedding,
    LowRankLinear,
    Matrix,
    low_rank_type,
    meta_copy,
    named_modules,
    unwrap,
)
from ..layers.base import unfit_reason
from ..planning import Plan, check_is_plan, progress, resolve
from ..planning import plan as make_plan
from ..planning.svd import check_values, svd_factors
from .factors import averaged_model, nan_factors, shared_factors, shared_ranks
from .optimizers import (
    Optimizers,
    check_optimizers,
    check_optimizers_complete,
    check_wrapper_passed,
    factorized_weights,
    warn_of_other_optimizers,
)
from .rewrite import Fill, Rewrite, commit

#: Share of ‖W‖² that the factors of a trained model must keep for it to work as before: rounding to 4 bits, which trained
#: models survive, has a relative error of about 0.1 too.
_KEPT = 0.99
_REMEDY = "pass it as optimizer=, or create it afterwards"


def factorize_(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizers = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Replace the planned layers by low-rank ones through a truncated SVD, in place.

    All factors are computed before the first layer is replaced, so an error or ctrl-C leaves the model unchanged. On a newly
    initialized model this is spectral initialization, for low-rank training without a warm-up. A trained model must be
    trained further: a warning says so where the factors keep too little.

    Args:
        model: Model without wrappers: factorize it before DDP and `torch.compile`.
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the current weights.
        optimizer: One or several. Their parameter groups and states are updated. New parameters go into the
            group of the old one; those that Muon does not accept (stacks of factors, as in recurrent layers) go to another
            optimizer.
        group: Process group of the workers that train this model without DDP, averaging gradients themselves; call it
            on all of them. Otherwise each computes its own factors, which the start of DDP makes equal, but nothing else.
            Parameters that differ get the values of the first worker, with a warning, and its plan is used; see
            `Switch.step` about optimizer state.

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
    check_not_inference("factorize_")
    check_unwrapped(model, "factorize_")
    if group is None:
        check_plan(model, plan, "factorize_")
        plan = plan if plan.resolved else resolve(plan, model)
        fill: Fill = svd_factors
        workers = None
    else:
        plan, fill, workers = _agreed(model, plan, optimizer, group)
    layers = len(plan.ranks)
    plan.warn_if_little_changes()
    optimizers = check_optimizers(optimizer)
    warn_of_other_optimizers(model, plan, optimizers, _REMEDY)
    # An optimizer with state goes on with a run that knows its loss; plain SGD keeps none.
    continues = any(x.state or x.defaults.get("momentum") == 0 for x in optimizers)
    with progress("factorizing layers", layers) as advance:
        change = Rewrite(model, optimizers)
        prepare = partial(change.factorize, plan, fill, advance)
        done = prepare() if workers is None else workers.run_on_all(prepare)
    change.carrier.warn_of_resets(stacklevel=3)
    commit([change], workers)
    kept = [1 - e.error**2 for e in done.entries if e.error is not None]
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


def _agreed(
    model: nn.Module, plan: Plan, optimizer: Optimizers, group: dist.ProcessGroup
) -> tuple[Plan, Fill, Workers]:
    """The plan of worker 0 with all ranks, checked on all workers, the factors that they compute together, and the workers."""
    check_is_plan(plan, "factorize_")
    job = Job(model, "factorize_", group)
    job.workers.agree(job.facts, 0, "model (names, types, shapes); make the same call on all workers")
    plan = Plan.from_data(job.workers.run_on_first(plan.as_data))

    def check(dense: nn.Module) -> None:
        check_optimizers(optimizer)
        check_plan(dense, plan, finite=True)

    job.check(check)
    plan = shared_ranks(job, plan)
    return plan, shared_factors(job, plan), job.workers


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
    check_plan(model, plan, "reshape_")
    if not plan.resolved:
        unresolved = next(e.name for e in plan.entries if e.rule is not None)
        raise ValueError(
            f"{unresolved}: the plan has a rule instead of a rank; pass the plan that factorize_ returned"
        )
    optimizers = check_optimizers(optimizer)
    warn_of_other_optimizers(model, plan, optimizers, _REMEDY)
    change = Rewrite(model, optimizers)
    done = change.factorize(plan, nan_factors)
    change.carrier.warn_of_resets(stacklevel=3)
    commit([change])
    return done


def low_rank_shapes(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy of a dense model after `plan`, with shapes but without values."""
    copy = meta_copy(model)
    if plan.ranks:
        reshape_(copy, plan)
    return copy


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
    check_not_inference("merge_")
    check_not_sharded(model, "merge_")
    ddp = find_ddp(model)
    check_rewrap(ddp)
    change = Rewrite(unwrap(model), check_optimizers(optimizer))
    change.merge()
    change.carrier.warn_of_resets(stacklevel=3)
    commit([change], wrappers=[ddp])  # on this worker: rank 0 may merge alone, for an export


def plan_of(model: nn.Module, dense: nn.Module | None = None) -> Plan:
    """The plan that gives the dense model the ranks that this model has now.

    Args:
        dense: The dense model, which may be on the meta device. Needed for FSDP2 models only, which cannot be copied.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8, keep=["1"]))
    >>> pf.lowrank.plan_of(model).ranks
    {'0': {'': 8}}
    """
    ranks = ranks_of(model)
    if dense is None:
        check_not_sharded(model, "plan_of")
        dense = meta_copy(unwrap(model))
        change = Rewrite(dense)
        change.merge()
        commit([change])
    embed = 1 if any(isinstance(m, LowRankEmbedding) for m in model.modules()) else None
    dense_plan = make_plan(dense, embed=embed)
    entries = []
    for e in dense_plan.entries:
        rank = ranks.get(e.layer, {}).get(e.matrix.name) if e.matrix else None
        reason = e.reason if e.matrix is None else "not factorized"
        entries.append(e.with_rank(rank) if rank else e.keep_dense(reason))
    layers = {e.layer for e in entries}  # not the projections inside of an attention layer
    shared: dict[int, list[str]] = {}
    for name, _, module in named_modules(model):
        if isinstance(module, LowRankLinear) and module._shared_input is not None and name in layers:
            shared.setdefault(id(module._shared_input), []).append(name)
    return dataclasses.replace(dense_plan.replace(entries), shared_inputs=tuple(map(tuple, shared.values())))


def ranks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Ranks of all low-rank layers, by layer and matrix name."""
    return {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}


def check_unwrapped(model: nn.Module, function: str) -> None:
    """Raise ValueError if the model is inside a wrapper such as DDP, or compiled."""
    if unwrap(model) is not model:
        raise ValueError(
            f"{function}: the model is wrapped in {type(model).__name__}; call it on the inner model "
            "(model.module under DDP), then wrap; pf.Switch changes a wrapped model in place"
        )
    if (module := find_compiled(model)) is not None:
        raise ValueError(
            f"{function}: {type(module).__name__} is already compiled; call it before torch.compile"
        )


def check_not_inference(function: str) -> None:
    """Raise RuntimeError in `torch.inference_mode`, whose tensors can never be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{function}: parameters created in torch.inference_mode cannot be trained; call it outside of this mode"
        )


def check_not_sharded(model: nn.Module, function: str) -> None:
    """Raise ValueError for an FSDP2 model."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{function}: the model is sharded (FSDP2); load its full state dict (get_model_state_dict of "
            "torch.distributed.checkpoint.state_dict) into a model with the same plan that is not sharded, and pass that"
        )


def find_compiled(model: nn.Module) -> nn.Module | None:
    """The first compiled module in the model, if there is one."""
    compiled = (m for m in model.modules() if "_orig_mod" in m._modules or m._compiled_call_impl is not None)
    return next(compiled, None)


def check_change(
    job: Job,
    dense: nn.Module,
    plan: Plan,
    optimizer: Optimizers,
    averages: Iterable[nn.Module],
    *,
    later: bool = False,
    now: bool = False,
) -> None:
    """Raise an error if a switch to `plan` would fail on this worker.

    Args:
        dense: `job.dense`.
        averages: copies of the model that change with it.
        later: whether the optimizers make updates before.
        now: whether it follows at once: also check the values, and that no optimizer is missing.
    """
    check_not_inference(job.workers.caller)
    check_plan(dense, plan, finite=now and not job.sharded)
    for average in averages:
        inner = averaged_model(average, job.inner)
        try:
            check_plan(inner, plan)
        except ValueError as error:
            raise ValueError(
                f"also: {type(average).__name__} is not a copy of the model: {error}; pass the module that has the same layers"
            ) from None
        check_plan(inner, plan, finite=now)
    optimizers = check_optimizers(optimizer, later)
    if now:
        check_optimizers_complete(job.inner, plan, optimizers)
    check_wrapper_passed(factorized_weights(job.inner, plan), job.ddp)


def check_plan(model: nn.Module, plan: Plan, caller: str = "", *, finite: bool = False) -> None:
    """Raise ValueError unless the model has the plan's layers, with the same types and shapes.

    Args:
        caller: the function that a user has passed the plan to; TypeError if it is none.
        finite: also check that the weights to factorize are finite.
    """
    if caller:
        check_is_plan(plan, caller)
    layers = {name: module for name, _, module in named_modules(model)}
    for e in plan.entries:
        if e.matrix is None:
            continue
        module = layers.get(e.layer)
        if module is None:
            raise ValueError(f"{e.name}: the plan has this layer, but the model does not")
        if type(module).__name__ != e.type:
            hint = "; it is already low-rank" * isinstance(module, LowRank)
            raise ValueError(
                f"{e.name}: the plan is for a {e.type}, the model has a {type(module).__name__}{hint}"
            )
        kind = low_rank_type(type(module))
        if kind is None:
            raise ValueError(
                f"{e.name}: no low-rank form is registered for {e.type}; call pufferfish.register first"
            )
        if reason := unfit_reason(module):
            raise ValueError(f"{e.name}: {reason}")
        matrix = {x.name: x for x in kind.matrices(module)}.get(e.matrix.name)
        if matrix != e.matrix:
            raise ValueError(f"{e.name}: the plan is for {_text(e.matrix)}, the model has {_text(matrix)}")
        if e.rank is None and e.rule is None:
            continue
        if e.layer == "":
            raise ValueError("the model itself is the layer to replace; wrap it in an nn.Sequential")
        if finite:
            check_values(e.name, module.get_parameter(e.matrix.weight))


def _text(matrix: Matrix | None) -> str:
    if matrix is None:
        return "no such weight"
    blocks = f" in {matrix.blocks} blocks" if matrix.blocks > 1 else ""
    return f"a weight of {'×'.join(map(str, matrix.shape))}{blocks} with{'out' * (not matrix.bias)} a bias"
