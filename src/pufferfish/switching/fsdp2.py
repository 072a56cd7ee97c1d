"""The switch under FSDP2, whose shards cannot be changed in place: the model is built again in low rank and filled.

In addition to its shards a worker holds at most two whole weights, and the memory that its SVD needs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ..compression.fsdp2_hook import find_fsdp2_hook
from ..compression.sharded import find_sharded_hook
from ..distributed.ddp import Job, reshard
from ..distributed.workers import Workers
from ..layers import FactorMap, local_part, named_modules, own_name, unwrap
from ..layers.names import REBUILT
from ..lowrank.factorize import reshape_
from ..lowrank.factors import broadcast_factors, by_weight, empty_factors, group_cost, owners, svd_of
from ..lowrank.optimizers import Optimizers, as_list, check_optimizers
from ..lowrank.rewrite import Carrier, check_accepted, placed, set_parameter, whole
from ..planning import Entry, Plan, matrix_spectrum
from ..planning.svd import NOT_FINITE

T = TypeVar("T")


class ShardedJob(Job):
    """A `Job` whose parameters are shards: plans are made for the model that `build` returns on the meta device."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module]) -> None:
        super().__init__(model, "switch.rebuild")
        self.build = build

    @cached_property
    def dense(self) -> nn.Module:
        return outline(self.model, self.build)

    def own_spectra(
        self, weights: list[tuple[Entry, nn.Parameter]], owner: Mapping[str, int]
    ) -> dict[str, Tensor]:
        entries, shards = [e for e, _ in weights], parameters(self.model)
        check_finite({name: shards[name] for name in by_weight(entries)}, self.workers)
        results: dict[str, Tensor] = {}
        for _, _, own in in_rounds(entries, owner, shards, self.workers, matrix_spectrum):
            results |= own
        return results


def outline(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """Build the dense model on the meta device, and check that it has the parameters of the sharded model.

    Plans are made for it, because `fully_shard` changes the types of modules (`FSDPLinear`).

    >>> build = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> outline(build(), build)[0].weight.device
    device(type='meta')
    >>> outline(build(), lambda: nn.Sequential(nn.Linear(64, 32)))
    Traceback (most recent call last):
    ValueError: build() returns 0.weight as torch.float32 32×64, but in the sharded model it is torch.float32 64×64
    """
    try:
        with torch.device("meta"):
            dense = build()
    except NotImplementedError as error:
        raise ValueError(
            f"build() cannot run on the meta device, where tensors have no values ({error}); move or load tensors "
            "outside of build()"
        ) from error
    here, there = parameters(model), parameters(dense)
    for name, p in there.items():
        if not p.is_meta:
            raise ValueError(
                f"build() returned {name} on {p.device}; it must build a new model on the default device, which is "
                "the meta device when it is called"
            )
    _check_names("parameter", here, there)
    _check_names("buffer", buffers(model), buffers(dense))
    for name, p in there.items():
        if _kind(p) != _kind(here[name]):
            raise ValueError(
                f"build() returns {name} as {_kind(p)}, but in the sharded model it is {_kind(here[name])}"
            )
        p.requires_grad_(here[name].requires_grad)
    modes = {name: module.training for name, _, module in named_modules(model)}
    for name, _, module in named_modules(dense):
        module.training = modes.get(name, module.training)
    return dense


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without wrappers, as shards even if a forward pass has left them gathered."""
    reshard(model)
    return {own_name(name): p for name, p in unwrap(model).named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by their names without wrappers; a shared buffer under each of its names."""
    named = unwrap(model).named_buffers(remove_duplicate=False)
    return {own_name(name): buffer for name, buffer in named}


def _check_names(what: str, here: Iterable[str], there: Iterable[str]) -> None:
    missing, extra = set(here) - set(there), set(there) - set(here)
    if missing or extra:
        raise ValueError(
            f"build() returns a different model: {what} {min(missing | extra)} is "
            + ("not in it" if missing else "not in the sharded model")
        )


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {'×'.join(map(str, x.shape))}"


def check_finite(weights: Mapping[str, Tensor], workers: Workers) -> None:
    """Raise ValueError on all workers if a shard of any of them is not finite."""
    bad = [not torch.isfinite(local_part(weight.detach())).all() for weight in weights.values()]
    for name, is_bad in zip(weights, workers.max(torch.tensor(bad, dtype=torch.int32)), strict=True):
        if is_bad:
            raise ValueError(f"{name}: {NOT_FINITE}")


def in_rounds(
    entries: Iterable[Entry],
    owner: Mapping[str, int],
    weights: Mapping[str, Tensor],
    workers: Workers,
    work: Callable[[Entry, Tensor], T],
) -> Iterator[tuple[str, int, dict[str, T]]]:
    """Gather each weight and call `work` with its matrices on the worker that owns it.

    In a round every worker works on one weight, so it holds at most two whole weights: its own, and the one that is
    being gathered for another worker. Small weights come first, so that their shards are freed before the large ones
    are gathered.

    Yields:
        The name of a weight, the rank of its owner, and on that worker the results by entry name.
    """
    groups = by_weight(entries)
    queues: list[list[str]] = [[] for _ in range(workers.size)]
    for name in sorted(groups, key=lambda name: group_cost(groups[name]), reverse=True):
        queues[owner[groups[name][0].name]].append(name)
    for names in reversed(list(itertools.zip_longest(*queues))):
        mine, weight = "", None
        for rank, name in enumerate(names):
            if name is not None:
                full = whole(weights[name])
                if rank == workers.rank:
                    mine, weight = name, full
                del full
        results = workers.run_on_all(partial(_results, groups.get(mine, []), weight, work))
        weight = None
        for rank, name in enumerate(names):
            if name is not None:
                yield name, rank, results if name == mine else {}


def _results(entries: list[Entry], weight: Tensor | None, work: Callable[[Entry, Tensor], T]) -> dict[str, T]:
    return {} if weight is None else {e.name: work(e, weight) for e in entries}


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
    targets = {name: factor_map.targets.get(name, (name,)) for name in parameters(model)}
    # In two steps: `shard` may call collectives, so all workers must get there.
    structure = workers.run_on_all(lambda: _structure(model, build, plan, targets, optimizers))
    new = workers.run_on_all(lambda: _sharded(structure, shard, model, targets))
    weights = parameters(model)
    groups = by_weight(e for e in plan if e.rank is not None)
    check_finite({name: p for name, p in weights.items() if name in groups}, workers)
    for hook in (find_fsdp2_hook(model), find_sharded_hook(model)):
        if hook is not None:
            hook.attach(new)

    carrier = Carrier(optimizers, unwrap(model).parameters(), carry, stream=True)
    arrived = NewParameters(unwrap(new))
    errors: dict[str, float] = {}
    entries = [e for name in weights for e in groups.get(name, ())]
    for name, rank, own in in_rounds(entries, owners(entries, workers.size), weights, workers, svd_of):
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for e in groups[name]:
            local = local_part(weights[name].detach())
            made = own.pop(e.name, None) or empty_factors(e, local)
            U, V, errors[e.name] = broadcast_factors(made, local, workers, rank)
            del made
            factors[e.name] = U, V
        transfer(weights.pop(name), factor_map, name, factors, arrived, carrier)
    for name, parameter in weights.items():
        if len(targets[name]) == 1:
            arrived.put(targets[name][0], parameter)
        else:
            transfer(parameter, factor_map, name, {}, arrived, carrier)
    _move_buffers(model, unwrap(new))
    _retire(model, new)
    carrier.commit(ExitStack(), parameters(new))
    carrier.warn_of_resets()
    return new, plan.replace(replace(e, error=errors.get(e.name, e.error)) for e in plan)


def _structure(
    model: nn.Module,
    build: Callable[[], nn.Module],
    plan: Plan,
    targets: Mapping[str, tuple[str, ...]],
    optimizers: list[Optimizer],
) -> nn.Module:
    """The low-rank model on the meta device, after the checks that need no other worker."""
    check_optimizers(optimizers)
    check_sharded(parameters(model))
    dense = outline(model, build)
    reshape_(dense, plan)
    new = parameters(dense)
    for name, p in parameters(model).items():
        for target in targets[name]:
            check_accepted(target, new[target], [p], optimizers)
    return dense


def check_sharded(shards: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all parameters can be gathered and sharded again."""
    if not any(isinstance(p, DTensor) for p in shards.values()):
        raise ValueError(
            "switch.rebuild needs a model sharded by fully_shard; call switch.step for other models"
        )
    for name, p in shards.items():
        if not isinstance(p, DTensor):
            continue
        mesh = p.device_mesh
        if not all(type(x) in (Shard, Replicate) for x in p.placements):
            raise ValueError(
                f"{name}: its placements are {p.placements}; only Shard and Replicate are supported"
            )
        if not p.is_meta and p.device.type != mesh.device_type:
            raise ValueError(
                f"{name}: its shards are offloaded to the {p.device.type} and cannot be rebuilt; train without offloading"
            )


def _sharded(
    structure: nn.Module,
    shard: Callable[[nn.Module], nn.Module | None],
    model: nn.Module,
    targets: Mapping[str, tuple[str, ...]],
) -> nn.Module:
    """Shard the low-rank model, and check that the parameters of `model` can be moved into it."""
    new = shard(structure)
    new = structure if new is None else new
    there = parameters(new)
    expected = {target for names in targets.values() for target in names}
    for name in sorted(expected ^ there.keys()):
        raise ValueError(f"shard() {'removed' if name in expected else 'added'} the parameter {name}")
    check_sharded(there)
    for name, p in parameters(model).items():
        like = there[targets[name][0]]
        if len(targets[name]) == 1 and _layout(p) != _layout(like):
            raise ValueError(
                f"{targets[name][0]}: shard() makes it {_layout(like)}, but in the model it is {_layout(p)}; "
                "shard both in the same way"
            )
    return new


def _layout(x: Tensor) -> Any:
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else "not sharded"


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
    local_part(old.detach()).untyped_storage().resize_(0)  # FSDP keeps a reference to the tensor


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
