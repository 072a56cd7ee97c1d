"""`factorize_`, `reshape_` and `merge_`: make a model low-rank, and dense again, in place."""

import warnings

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers import LowRank, meta_copy
from ..layers.names import named_modules, unwrap
from ..optim.carry import Optimizers, as_list, warn_of_stacks
from ..planning import svd
from ..planning.entries import Entry
from ..planning.plan import Plan, check_is_plan, resolve
from .checks import (
    check_not_inference,
    check_plan,
    check_unwrapped,
    factorized_weights,
    find_compiled,
    warn_of_other_optimizers,
)
from .rewrite import Fill, OnAll, Rewrite, alone, empty_factors, merge_layers_, nan_factors, replace_layers_

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
    check_is_plan(plan, "factorize_")
    fill: Fill = svd_factors
    on_all: OnAll = alone
    if group is None:
        check_plan(model, plan, finite=True)
        plan = resolve(plan, model)
    else:
        from ..distributed.ddp import agreed_factors  # workers are the concern of a package below this one

        plan, fill, workers = agreed_factors(model, plan, as_list(optimizer), group)
        on_all = workers.run_on_all
    plan.warn_if_little_changes()
    warn_of_other_optimizers(model, plan, as_list(optimizer), _REMEDY)
    warn_of_stacks(as_list(optimizer), factorized_weights(model, plan), stacklevel=2)
    # An optimizer with state goes on with a run that knows its loss; plain SGD keeps none.
    continues = any(x.state or x.defaults.get("momentum") == 0 for x in as_list(optimizer))
    done = replace_layers_(model, plan, optimizer, fill, on_all)
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


def svd_factors(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors of one matrix by truncated SVD, and the relative error; without values on the meta device."""
    assert e.rank is not None
    return (*empty_factors(e, W), None) if W.is_meta else svd.split(W, e.rank)


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
    if unwrap(model) is model and find_compiled(model) is None:
        merge_layers_(model, optimizer)
        return
    from ..distributed.ddp import Job  # wrappers are the concern of a package below this one

    job = Job(model, "merge_")
    job.check_rewrap()
    change = Rewrite(job.inner, optimizer)
    change.merge()  # on this worker: rank 0 may merge alone, for an export
    job.commit([change])
    change.carrier.warn_of_resets(stacklevel=3)


def ranks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Ranks of all low-rank layers, by layer and matrix name."""
    return {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}
