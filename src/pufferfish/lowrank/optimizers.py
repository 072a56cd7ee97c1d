"""Which optimizers can follow a change of the model: known types and their state, checks, and those that were forgotten."""

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..layers import named_modules
from ..planning import Plan

T = TypeVar("T")
State = dict[str, Any]
Optimizers = Optimizer | Sequence[Optimizer] | None

#: How each state tensor of torch's optimizers depends on the gradients.
KINDS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg"), "gradient"),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), "square"),
}
NUMBERS = {"step", "mu_product"}
SUPPORTED = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad, optim.Muon,
)  # fmt: skip
_REFUSED = (optim.LBFGS, optim.SparseAdam)
CARRIED = f"state is carried for {', '.join(kind.__name__ for kind in SUPPORTED)} of torch.optim"
#: Names under which optimizers count their updates once per parameter group (schedule-free: k, apex and timm: step).
_COUNTERS = ("k", "step")


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    """Return the optimizers as a list, without the wrappers of trainers."""
    if optimizer is None:
        return []
    if isinstance(optimizer, nn.Module) or not isinstance(optimizer, Optimizer | Iterable):
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer; pass an optimizer, or a list of them"
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return [_unwrap(o) for o in optimizers]


def _unwrap(optimizer: Optimizer) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        return optimizer  # `check_optimizers` refuses it; a scheduler has an attribute `optimizer` too
    wrapped = getattr(optimizer, "optimizer", None)
    for inner in (wrapped, *_held(optimizer)):
        if isinstance(inner, Optimizer) and (
            inner is wrapped or inner.param_groups is optimizer.param_groups
        ):
            return _unwrap(inner)
    return optimizer


def _held(optimizer: Optimizer) -> list[Optimizer]:
    """Other optimizers among the attributes: SAM and Lookahead keep the one that they wrap."""
    return [x for x in vars(optimizer).values() if isinstance(x, Optimizer)]


def check_optimizers(passed: Optimizers, later: bool = False) -> list[Optimizer]:
    """`as_list`; raises TypeError for optimizers whose parameters cannot be replaced.

    Args:
        later: whether they make updates before their parameters are replaced.
    """
    optimizers = as_list(passed)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if isinstance(optimizer, _REFUSED):
            raise TypeError(
                f"{type(optimizer).__name__} does not support a change of parameters; "
                "delete it first, and create a new one afterwards"
            )
        if held := _held(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} contains {type(held[0]).__name__}, with parameter groups of its own, so its "
                "parameters cannot be replaced; delete it first, and create a new one after pf.factorize_"
            )
        if not _carries_all(optimizer) and (counter := _group_counter(optimizer, later)):
            raise TypeError(
                f"{type(optimizer).__name__} counts its updates for all parameters together ({counter!r}), so new ones would "
                "start without moments but with the old count, and their updates would be far too large; delete it first, "
                "and create a new one after pf.factorize_"
            )
    return optimizers


def _group_counter(optimizer: Optimizer, later: bool) -> str:
    """Name of the number of updates that is not part of a parameter's state; "" if there is none, or none was made yet."""
    shared: State = {str(k): x for k, x in optimizer.state.items() if not isinstance(k, Tensor)}
    for place in (*optimizer.param_groups, shared):
        for name in _COUNTERS:
            if name in place and (later or place[name] != 0):
                return name
    return ""


def _carries_all(optimizer: Optimizer) -> bool:
    """Whether all state that the optimizer has now, and will have, can be carried."""
    states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]
    known = isinstance(optimizer, SUPPORTED) and not optimizer.defaults.get("centered")  # an RMSprop
    return known and all(map(can_carry, states))


def can_carry(state: State) -> bool:
    """Whether all state of one parameter can be carried."""
    return all(value is None or key in KINDS or key in NUMBERS for key, value in state.items())


def type_name(optimizer: Optimizer) -> str:
    """Type with its module: `torch.optim.Muon` is not the Muon of another package."""
    kind = type(optimizer)
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__name__}"


def warn_of_reset(optimizers: Iterable[Optimizer], weights: Collection[int], stacklevel: int) -> None:
    """Warn of the optimizers that hold one of `weights` (ids) and will lose the state of replaced parameters."""
    for optimizer in optimizers:
        held = any(id(p) in weights for group in optimizer.param_groups for p in group["params"])
        if held and not _carries_all(optimizer):
            warnings.warn(
                f"{type_name(optimizer)}: the state of the parameters that the switch replaces will be reset; {CARRIED}",
                stacklevel=stacklevel + 1,
            )


def factorized_weights(model: nn.Module, plan: Plan) -> dict[int, str]:
    """Names of the parameters that the plan factorizes, by id."""
    layers = {name: module for name, _, module in named_modules(model)}
    return {
        id(layers[e.layer].get_parameter(e.matrix.weight)): f"{e.layer}.{e.matrix.weight}"
        for e in plan.entries
        if e.matrix is not None and (e.rank or e.rule)
    }


def check_optimizers_complete(model: nn.Module, plan: Plan, optimizers: list[Optimizer]) -> None:
    """Raise ValueError if a weight that the plan replaces is in another optimizer, or is trained but in none of those passed.

    Its factors would be in no optimizer and stay as they are.

    Args:
        optimizers: those that will be updated.
    """
    for name, other in _untrained(model, plan, optimizers):
        if other is None:
            raise ValueError(
                f"{name}: it is trained (requires_grad), but no optimizer that was passed to the switch holds it, so its "
                "factors would not be trained; pass every optimizer, or leave the layer dense with keep="
            )
        check_optimizers(other)  # the wrapper of one that was passed cannot be passed either
        raise ValueError(
            f"{name}: another optimizer ({type(other).__name__}) holds this parameter and was not passed to the switch; "
            "pass all optimizers as a list"
        )


def warn_of_other_optimizers(model: nn.Module, plan: Plan, optimizers: list[Optimizer], remedy: str) -> None:
    """Warn if the optimizers passed would not train the factors of a weight that the plan replaces."""
    for name, other in _untrained(model, plan, optimizers):
        why = (
            f"an existing optimizer ({type(other).__name__}) holds it and does not train them"
            if other is not None
            else "no optimizer that was passed holds it, so none trains them"
        )
        warnings.warn(f"{name} is replaced by two factors, but {why}; {remedy}", stacklevel=3)
        return


def _untrained(
    model: nn.Module, plan: Plan, optimizers: list[Optimizer]
) -> list[tuple[str, Optimizer | None]]:
    """Weights that the plan replaces and that another optimizer holds, or that are trained but not held by any passed one."""
    weights = factorized_weights(model, plan)
    found: list[tuple[str, Optimizer | None]] = [*_alive(lambda: _held_by_others(weights, optimizers))]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [id(p) for p in model.parameters() if p.requires_grad] if optimizers else []
    return found + [(weights[i], None) for i in trained if i in weights and i not in held]


def _held_by_others(weights: Mapping[int, str], optimizers: list[Optimizer]) -> list[tuple[str, Optimizer]]:
    """(parameter name, optimizer) of every weight that an optimizer not in `optimizers` holds."""
    passed = {id(optimizer.param_groups) for optimizer in optimizers}
    groups = [(x, getattr(x, "param_groups", ())) for x in _live_objects(Optimizer)]
    held = [(p, x) for x, own in groups if id(own) not in passed for g in own for p in g["params"]]
    return [(weights[id(p)], x) for p, x in held if id(p) in weights]


def check_wrapper_passed(weights: Mapping[int, str], ddp: DistributedDataParallel | None) -> None:
    """Raise ValueError if another DDP wrapper holds one of the weights: it would not average the gradients of the factors.

    Args:
        weights: names of the parameters that will be replaced, by id.
        ddp: the wrapper that was passed.
    """
    for name in _alive(lambda: _wrapped_by_others(weights, ddp)):
        raise ValueError(
            f"{name}: the model is wrapped in DistributedDataParallel, which was not passed and would not average the "
            "gradients of the new factors; pass the wrapper, not its module"
        )


def _wrapped_by_others(weights: Mapping[int, str], ddp: DistributedDataParallel | None) -> list[str]:
    """Names of the weights that a DDP wrapper other than `ddp` holds."""
    others = [x for x in _live_objects(DistributedDataParallel) if x is not ddp and "_modules" in vars(x)]
    return [weights[id(p)] for x in others for p in x.parameters() if id(p) in weights]


def _alive(find: Callable[[], list[T]]) -> list[T]:
    """Return what `find` finds among live objects. Those without references, which wait for a collection, do not count."""
    if not find():
        return []
    gc.collect()
    return find()


def _live_objects(kind: type[T]) -> list[T]:
    """All objects of this type, or of one derived from it, that the garbage collector tracks."""
    kinds = _subclasses(kind)
    # Compare types: isinstance reads `__class__`, which makes lazy objects load what they stand for.
    return [x for x in gc.get_objects() if type(x) in kinds]


def _subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_subclasses, children))
