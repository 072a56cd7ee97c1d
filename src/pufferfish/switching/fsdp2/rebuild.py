"""`rebuild`: build the low-rank model anew and move a sharded model's parameters and optimizer state into it.

In addition to its shards a worker holds at most two whole weights, and the memory that its SVD needs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...compression.fsdp2_hook import find_fsdp2_hook
from ...distributed.ddp import broadcast_factors, owners, svd_of
from ...distributed.workers import Workers
from ...layers import FactorMap
from ...layers.names import REBUILT, named_modules, own_name, unwrap
from ...lowrank.checks import check_accepted
from ...lowrank.factorize import reshape_
from ...lowrank.rewrite import set_parameter
from ...optim.carry import Carrier, Optimizers, Undo, as_list, check_optimizers, placed, whole
from ...planning.plan import Plan
from .outline import buffers, check_finite, check_same_sharding, check_sharded, local, outline, parameters
from .sharded_job import by_weight, in_rounds


def rebuild(
    model: nn.Module,
    optimizer: Optimizers,
    plan: Plan,
    *,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module | None],
    carry: bool,
    workers: Workers,
) -> tuple[nn.Module, Plan]:
    """Replace a sharded dense model by a sharded low-rank one with its parameters, buffers and optimizer state.

    Everything that can fail is checked first and leaves the model unchanged. Then each weight is gathered,
    factorized on one worker, broadcast and sharded, followed by its optimizer state; the old shards are freed at
    once. Parameters that are not factorized are moved as they are. Hooks are those that `build` and `shard`
    register. `model` is empty afterwards.

    Args:
        optimizer: one or several, changed in place, so that schedulers and scalers stay attached.
        plan: with all ranks, and the same on all workers.
        build: builds the dense model, as at the start. It is called on the meta device.
        shard: applies `fully_shard` to it, as at the start: in place, or it returns the model to use.
        carry: whether optimizer state is carried over to the factors, or dropped.

    Returns:
        The new model, and the plan with the relative error of each layer.
    """
    optimizers, factor_map = as_list(optimizer), plan.factor_map

    def low_rank() -> nn.Module:
        check_optimizers(optimizers)
        check_sharded(parameters(model))
        dense = outline(model, build)
        reshape_(dense, plan)
        new = parameters(dense)
        for name, p in parameters(model).items():
            for target in targets_of(name):
                check_accepted(target, new[target], [p], optimizers)
        return dense

    def targets_of(name: str) -> tuple[str, ...]:
        return factor_map.targets.get(name, (name,))

    # In two steps: `shard` may call collectives, so all workers must get there.
    structure = workers.run_on_all(low_rank)
    new = workers.run_on_all(lambda: _shard(structure, shard, model, targets_of))
    weights = parameters(model)
    groups = by_weight(e for e in plan if e.rank is not None)
    check_finite({name: p for name, p in weights.items() if name in groups}, workers)
    if (hook := find_fsdp2_hook(model)) is not None:
        hook.attach(new)

    carrier = Carrier(optimizers, unwrap(model).parameters(), carry, stream=True)
    arrived = NewParameters(unwrap(new))
    errors: dict[str, float] = {}
    entries = [e for name in weights for e in groups.get(name, ())]
    for name, rank, own in in_rounds(entries, owners(entries, workers.size), weights, workers, svd_of):
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for e in groups[name]:
            U, V, errors[e.name] = broadcast_factors(
                e, own.pop(e.name, None), local(weights[name]), workers, rank
            )
            factors[e.name] = U, V
        transfer(weights.pop(name), factor_map, name, factors, arrived, carrier)
    for name, parameter in weights.items():
        if len(targets_of(name)) == 1:
            arrived.put(targets_of(name)[0], parameter)
        else:
            transfer(parameter, factor_map, name, {}, arrived, carrier)
    _move_buffers(model, unwrap(new))
    _retire(model, new)
    carrier.commit(Undo(), parameters(new))
    carrier.warn_of_resets()
    return new, plan.replace(replace(e, error=errors.get(e.name, e.error)) for e in plan)


class NewParameters:
    """Parameters of the new model, assigned one by one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: dict[str, list[str]] = {}  # a tied parameter has several paths
        names: dict[int, str] = {}
        for path, p in model.named_parameters(remove_duplicate=False):
            self.paths.setdefault(names.setdefault(id(p), own_name(path)), []).append(path)

    def get(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(self.paths[name][0])

    def put(self, name: str, parameter: nn.Parameter) -> None:
        for path in self.paths[name]:
            set_parameter(self.model, path, parameter)


def transfer(
    old: nn.Parameter,
    factor_map: FactorMap,
    name: str,
    factors: dict[str, tuple[Tensor, Tensor]],
    arrived: NewParameters,
    carrier: Carrier,
) -> None:
    """Assign the factors and slices of one dense parameter to the new model, then its optimizer state; free it."""
    parts = factor_map.parts[name]
    copied = any(part.rank is None for part in parts)
    value = whole(old) if copied else torch.empty(old.shape, dtype=old.dtype, device="meta")
    kept: dict[str, Tensor] = {}  # whole factors
    pieces = factor_map.split(name, value, lambda part, W: factors[part.name])
    for target, piece in pieces:
        like = arrived.get(target)
        arrived.put(target, nn.Parameter(placed(piece, like, like.dtype), like.requires_grad))
        if any(part.rank and target in part.targets for part in parts):
            kept[target] = piece
    del value, pieces, piece
    carrier.split(
        factor_map, name, old, {target: arrived.get(target) for target in factor_map.targets[name]}, kept
    )
    old.grad = None
    local(old).untyped_storage().resize_(0)  # FSDP keeps a reference to the tensor


def _shard(
    structure: nn.Module,
    shard: Callable[[nn.Module], nn.Module | None],
    model: nn.Module,
    targets_of: Callable[[str], tuple[str, ...]],
) -> nn.Module:
    """Shard the low-rank model, and check that the parameters of `model` can be moved into it."""
    new = shard(structure)
    new = structure if new is None else new
    here, there = parameters(model), parameters(new)
    expected = {target for name in here for target in targets_of(name)}
    for name in sorted(expected ^ there.keys()):
        raise ValueError(f"shard() {'removed' if name in expected else 'added'} the parameter {name}")
    check_sharded(there)
    check_same_sharding(
        {targets_of(name)[0]: p for name, p in here.items() if len(targets_of(name)) == 1}, there
    )
    return new


def _move_buffers(old: nn.Module, new: nn.Module) -> None:
    """Move buffers, and tensors that are plain attributes, which have no values on the meta device either."""
    values = buffers(old)
    for path, _ in list(new.named_buffers(remove_duplicate=False)):
        owner, _, leaf = path.rpartition(".")
        new.get_submodule(owner)._buffers[leaf] = values[own_name(path)]
    modules = {name: module for name, _, module in named_modules(old)}
    for name, _, module in named_modules(new):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and name in modules:
                vars(module)[key] = vars(modules[name]).get(key)


def _retire(model: nn.Module, new: nn.Module) -> None:
    """Remove all tensors of the old model, and make its forward pass raise."""

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError("this model was rebuilt; use the model that switch.rebuild returned")

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update(dict.fromkeys(tensors))
    for module in {model, unwrap(model)}:
        module.register_forward_pre_hook(refuse, prepend=True)
        vars(module)[REBUILT] = new  # not as a submodule
