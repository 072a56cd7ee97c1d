"""Checks made before a model is changed: the plan fits it, and no optimizer or wrapper is missing."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..layers import FactorMap, LowRank, Matrix, low_rank_type
from ..layers.base import CALL_HOOKS, HOOKS, unfit_reason
from ..layers.names import named_modules, unwrap
from ..planning.plan import Plan
from ..planning.svd import check_values
from .carry import accepts, as_list, check_optimizers

T = TypeVar("T")


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


def check_structure(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError unless the model has the plan's layers, with the same types and shapes."""
    layers = {name: module for name, _, module in named_modules(model)}
    for e in plan.entries:
        if e.matrix is None:
            continue
        module = layers.get(e.layer)
        if module is None:
            raise ValueError(f"{e.name}: the plan has this layer, but the model does not")
        if type(module).__name__ != e.type:
            hint = "; it is already low-rank" if isinstance(module, LowRank) else ""
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


def check_plan(model: nn.Module, plan: Plan, finite: bool = False) -> None:
    """Raise ValueError unless every layer of the plan can be replaced. Keeps no reference to the model.

    Args:
        finite: also check that the weights to factorize are finite.
    """
    check_structure(model, plan)
    layers = {name: module for name, _, module in named_modules(model)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: dict[str, list[str]] = {}
    for e in plan.entries:
        if e.matrix is None or (e.rank is None and e.rule is None):
            continue
        module = layers[e.layer]
        if finite and not (weight := module.get_parameter(e.matrix.weight)).is_meta:
            check_values(e.name, weight)
        if e.layer == "":
            raise ValueError("the model itself is the layer to replace; wrap it in an nn.Sequential")
        chosen.setdefault(e.layer, []).append(e.matrix.name)
    for layer, names in chosen.items():
        _check_replaced(layer, layers[layer], names, uses)


def _check_replaced(layer: str, module: nn.Module, names: list[str], uses: Counter[int]) -> None:
    """Raise ValueError unless the parameters of a layer can be replaced, if the matrices `names` are factorized.

    Args:
        uses: how often the model has each parameter, by id.
    """
    kind = low_rank_type(type(module))
    assert kind is not None
    replaced = FactorMap(("", x, int(x.name in names) or None) for x in kind.matrices(module)).replaced
    for name in replaced:
        parameter = module.get_parameter(name)
        if uses[id(parameter)] > 1:
            raise ValueError(f"{layer}: its {name} is shared with another layer of this model")
        if type(parameter.data) is not Tensor:
            raise ValueError(f"{layer}: its {name} is a {type(parameter.data).__name__}, not a plain tensor")
    check_hooks(layer, module, [*replaced])


def _text(matrix: Matrix | None) -> str:
    if matrix is None:
        return "no such weight"
    blocks = f" in {matrix.blocks} blocks" if matrix.blocks > 1 else ""
    return f"a weight of {'×'.join(map(str, matrix.shape))}{blocks} with{'out' * (not matrix.bias)} a bias"


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


def check_accepted(name: str, new: Tensor, old: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
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


def factorized_weights(model: nn.Module, plan: Plan) -> dict[int, str]:
    """Names of the parameters that the plan factorizes, by id."""
    layers = {name: module for name, _, module in named_modules(model)}
    return {
        id(layers[e.layer].get_parameter(e.matrix.weight)): f"{e.layer}.{e.matrix.weight}"
        for e in plan
        if e.matrix is not None and (e.rank or e.rule)
    }


def check_optimizers_complete(model: nn.Module, plan: Plan, optimizers: list[Optimizer]) -> None:
    """Raise ValueError if a weight that the plan replaces is in another optimizer, or is trained but in none of those passed.

    Its factors would be in no optimizer and stay as they are.

    Args:
        optimizers: those that will be updated.
    """
    weights = factorized_weights(model, plan)
    for name, other in _alive(lambda: _held_by_others(weights, optimizers)):
        check_optimizers(as_list(other))  # the wrapper of one that was passed cannot be passed either
        raise ValueError(
            f"{name}: another optimizer ({type(other).__name__}) holds this parameter and was not passed to the switch; "
            "pass all optimizers as a list"
        )
    for name in _in_no_optimizer(model, weights, optimizers):
        raise ValueError(
            f"{name}: it is trained (requires_grad), but no optimizer that was passed to the switch holds it, so its factors "
            "would not be trained; pass every optimizer, or leave the layer dense with keep="
        )


def _in_no_optimizer(model: nn.Module, weights: Mapping[int, str], optimizers: list[Optimizer]) -> list[str]:
    """Names of the weights with requires_grad that none of the optimizers holds; none if there are no optimizers."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    return [weights[i] for i in trained if i in weights and i not in held] if optimizers else []


def warn_of_other_optimizers(model: nn.Module, plan: Plan, optimizers: list[Optimizer], remedy: str) -> None:
    """Warn if an optimizer that was not passed holds a weight that the plan replaces: it would not train the factors."""
    check_optimizers(optimizers)
    weights = factorized_weights(model, plan)
    if not weights or next(model.parameters()).is_meta:
        return
    problems = [
        f"{name} is replaced by two factors, but an existing optimizer ({type(other).__name__}) holds it and does not train "
        f"them; {remedy}"
        for name, other in _alive(lambda: _held_by_others(weights, optimizers))
    ]
    problems += [
        f"{name} is replaced by two factors, but no optimizer that was passed holds it, so none trains them; {remedy}"
        for name in _in_no_optimizer(model, weights, optimizers)
    ]
    for problem in problems[:1]:
        warnings.warn(problem, stacklevel=3)


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


def _held_by_others(weights: Mapping[int, str], optimizers: list[Optimizer]) -> list[tuple[str, Optimizer]]:
    """(parameter name, optimizer) of every weight that an optimizer not in `optimizers` holds."""
    passed = {id(optimizer.param_groups) for optimizer in optimizers}
    groups = [(x, getattr(x, "param_groups", ())) for x in _live_objects(Optimizer)]
    held = [(p, x) for x, own in groups if id(own) not in passed for g in own for p in g["params"]]
    return [(weights[id(p)], x) for p, x in held if id(p) in weights]


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
