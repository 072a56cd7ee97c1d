"""`rebuild`: build the low-rank model anew and move a sharded model's parameters and optimizer state into it.

In addition to its shards a worker holds at most two whole weights, and the memory that its SVD needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor, nn

from ...compression.fsdp2_hook import find_fsdp2_hook
from ...distributed.shared_svd import broadcast_factors, owners
from ...distributed.workers import Workers
from ...layers.names import REBUILT, named_modules, own_name, unwrap
from ...lowrank.checks import check_accepted
from ...lowrank.factorize import reshape_, svd_factors
from ...optim.carry import Carrier, Optimizers, Undo, as_list, check_optimizers
from ...planning.plan import Plan
from .outline import buffers, check_finite, check_same_sharding, check_sharded, local, outline, parameters
from .routes import Factors, NewParameters, Route, find_routes, transfer
from .sharded_job import in_rounds


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
    optimizers = as_list(optimizer)

    def low_rank() -> tuple[nn.Module, dict[str, Route]]:
        check_optimizers(optimizers)
        check_sharded(parameters(model))
        dense = outline(model, build)
        routes = find_routes(dense, plan)
        reshape_(dense, plan)
        new = parameters(dense)
        for name, p in parameters(model).items():
            for target in routes[name].targets:
                check_accepted(target, new[target], [p], optimizers)
        return dense, routes

    # In two steps: `shard` may call collectives, so all workers must get there.
    structure, routes = workers.run_on_all(low_rank)
    new = workers.run_on_all(lambda: _shard(structure, shard, model, routes, workers))
    weights = parameters(model)
    check_finite({name: p for name, p in weights.items() if routes[name].entries}, workers)
    if (hook := find_fsdp2_hook(model)) is not None:
        hook.attach(new)

    carrier = Carrier(optimizers, unwrap(model), carry, stream=True)
    arrived = NewParameters(unwrap(new), workers.device)
    errors: dict[str, float] = {}
    entries = [e for name in weights for e in routes[name].entries]
    owner = owners(entries, workers.size)
    for name, rank, own in in_rounds(entries, owner, weights, workers, svd_factors):
        factors: Factors = {}
        for e in routes[name].entries:
            down, up, errors[e.name] = broadcast_factors(
                e, own.pop(e.name, None), local(weights[name]), workers, rank
            )
            factors[e.name] = down, up
        transfer(weights.pop(name), routes[name], factors, arrived, carrier)
    for name, parameter in weights.items():
        if routes[name].unchanged:
            arrived.put(routes[name].targets[0], parameter)
        else:
            transfer(parameter, routes[name], {}, arrived, carrier)
    _move_buffers(model, unwrap(new))
    _retire(model, new)
    carrier.model = unwrap(new)
    carrier.commit(Undo())
    carrier.warn_of_resets()
    return new, plan.replace(replace(e, error=errors.get(e.name, e.error)) for e in plan)


def _shard(
    structure: nn.Module,
    shard: Callable[[nn.Module], nn.Module | None],
    model: nn.Module,
    routes: Mapping[str, Route],
    workers: Workers,
) -> nn.Module:
    """Shard the low-rank model, and check that the parameters of `model` can be moved into it."""
    new = shard(structure)
    new = structure if new is None else new
    here, there = parameters(model), parameters(new)
    expected = {target for name in here for target in routes[name].targets}
    for name in sorted(expected ^ there.keys()):
        raise ValueError(f"shard() {'removed' if name in expected else 'added'} the parameter {name}")
    check_sharded(there)
    check_same_sharding(
        {routes[name].targets[0]: p for name, p in here.items() if routes[name].unchanged}, there
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
