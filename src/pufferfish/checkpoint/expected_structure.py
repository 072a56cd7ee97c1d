"""Structure that a model and its optimizers need to load a checkpoint, computed without changing them."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn, optim

from ..distributed.ddp import Job
from ..layers import meta_copy
from ..layers.names import own_name, unwrap
from ..lowrank.checks import check_plan
from ..lowrank.factorize import ranks_of, svd_factors
from ..lowrank.plan_of import plan_of
from ..lowrank.rewrite import Rewrite, nan_factors, replace_layers_
from ..optim.by_name import group_names, names_by_id
from ..planning.plan import Plan
from ..switching.switch import Switch
from .sharded_tensors import is_sharded

Ranks = dict[str, dict[str, int]]


def known_plan(model: nn.Module, switch: Switch | None) -> Plan | None:
    """Return the plan that makes the dense model this one; None if it is dense or not known."""
    ranks, report = ranks_of(model), switch.report if switch else None
    if report is not None and report.plan.ranks == ranks:
        return report.plan
    return plan_of(model) if ranks and not is_sharded(model) else None


def expected_structure(
    path: Path,
    ranks: Ranks,
    plan: Plan | None,
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer] = (),
    may_change: bool = True,
) -> tuple[nn.Module, list[optim.Optimizer]]:
    """Return model and optimizers with the structure of the saved ones; `model` itself is not changed.

    These are the given objects if their structure fits, otherwise a converted copy on the meta device.

    Args:
        path: the checkpoint, for error messages.
        ranks: ranks of the saved model's low-rank layers.
        plan: the plan that makes a dense model the saved one.
        may_change: whether a dense model may be converted.
    """
    current = ranks_of(model)
    for name, p in unwrap(model).named_parameters():
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=…) before resume")
    if current == ranks:
        return model, list(optimizers)
    if current or plan is None or not may_change or is_sharded(model):
        raise ValueError(
            f"{path}: the saved model is {_describe(ranks)}, this one is {_describe(current)}; build it dense and "
            "pass switch=, or call pf.reshape_(model, pf.Checkpoint.plan_in(folder)) before wrapping it"
        )
    names, copy = names_by_id(model), meta_copy(model)
    by_name = {own_name(name): p for name, p in unwrap(copy).named_parameters()}
    stand_ins: list[optim.Optimizer] = []
    for optimizer in optimizers:
        groups = [{"params": [by_name[name] for name in group]} for group in group_names(optimizer, names)]
        # Muon takes matrices only, so some of its factors go to another optimizer.
        kind = optim.Muon if isinstance(optimizer, optim.Muon) else optim.SGD
        stand_ins.append(kind(groups))
    try:
        check_plan(unwrap(copy), plan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    replace_layers_(unwrap(copy), plan, stand_ins, svd_factors)
    return copy, stand_ins


def restructure_(
    model: nn.Module, ranks: Ranks, plan: Plan | None, optimizers: Sequence[optim.Optimizer] = ()
) -> None:
    """Give a dense model, such as an averaged copy, the structure that `expected_structure` has checked."""
    if plan is not None and ranks_of(model) != ranks:
        change = Rewrite(unwrap(model), optimizers)
        change.factorize(plan, nan_factors)
        Job(model).commit([change], {})


def _describe(ranks: Ranks) -> str:
    return f"low-rank in {len(ranks)} layers" if ranks else "dense"
