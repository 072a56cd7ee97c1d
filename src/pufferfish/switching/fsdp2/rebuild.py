"""The switch under FSDP2, whose shards cannot be changed in place: a new model takes over from the old one.

Beside its shards a rank holds at most two whole weights, one that it splits and one that comes by on its way to
another rank, and what its SVD needs (`svd.split`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ...compression.fsdp2_hook import attached
from ...distributed.workers import Workers, balanced, svd_cost
from ...layers.names import named_modules, own_name, unwrap
from ...lowrank.factorize import by_svd, empty_factors, reshape_
from ...optim.carry import Carrier, Optimizers, as_list, check
from ...planning import svd
from ...planning.candidates import candidates
from ...planning.plan import Entry, Plan
from .outline import buffers, check_alike, check_finite, check_sharded, local, outline, parameters, whole
from .routes import Arrivals, Factors, Route, find_routes, take_apart

Found = TypeVar("Found")


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
    """A low-rank model, sharded by `shard`, that goes on where the sharded dense `model` stands.

    Everything that can fail comes first and leaves the model as it was. Then weight by weight: gathered, split
    on one rank, sent to all, sharded; its optimizer state likewise; the old shards freed at once. Parameters
    that stay as they are move over with their state, and so do buffers. Hooks are those that `build` and
    `shard` give. Nothing is left of `model`.

    Args:
        optimizer: one or several, changed in place, so that schedulers and scalers stay attached.
        plan: resolved, and the same on all ranks.
        build: makes the dense model, as at the start. It is called on the meta device.
        shard: applies `fully_shard` to it, as at the start; in place, or it returns the model to use.
        carry: whether moments go along with the weights that are split; else those start without.

    Returns:
        The new model, and the plan with each layer's relative error.
    """
    optimizers = as_list(optimizer)

    def low_rank() -> tuple[nn.Module, dict[str, Route]]:
        check(optimizers)
        check_sharded(parameters(model))
        dense = outline(model, build)
        routes = find_routes(dense, plan)
        reshape_(dense, plan)
        return dense, routes

    # Two steps, for `shard` may talk to the other ranks: they must be there.
    structure, routes = workers.together(low_rank)
    new = workers.together(lambda: _sharded(structure, shard, model, routes, workers))
    weights = parameters(model)
    splits = {name: routes[name].entries for name in weights if routes[name].entries}
    check_finite({name: weights[name] for name in splits}, workers)
    if (hook := attached(model)) is not None:
        hook.attach(new)

    carrier, arrivals = Carrier(optimizers, unwrap(model), carry), Arrivals(unwrap(new), workers.device)
    errors: dict[str, float] = {}
    for name, owner, made in _shared_out(splits, weights, workers, by_svd):
        factors: Factors = {}
        for i, e in enumerate(splits[name]):
            down, up, errors[e.name] = _sent(e, made[i] if made else None, weights[name], owner, workers)
            factors[e.name] = down, up
        take_apart(weights.pop(name), routes[name], factors, arrivals, carrier)
    for name, parameter in weights.items():
        if routes[name].same:
            arrivals.put(routes[name].targets[0], parameter)
        else:
            take_apart(parameter, routes[name], {}, arrivals, carrier)
    _move_buffers(model, unwrap(new))
    _retire(model)
    carrier.model = unwrap(new)
    carrier.finish()
    return new, plan.replace(replace(e, error=errors.get(e.name, e.error)) for e in plan)


def spectra(
    model: nn.Module, dense: nn.Module, workers: Workers, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """`pufferfish.spectra` of a sharded model whose outline is `dense`: each on one rank, then sent to all.

    >>> build = lambda: nn.Sequential(nn.Linear(64, 32))
    >>> alone = Workers(None, torch.device("cpu"))
    >>> {name: len(s) for name, s in spectra(build(), outline(build(), build), alone).items()}
    {'0': 32}
    """
    wanted = None if names is None else set(names)
    jobs: dict[str, list[Entry]] = {}
    for e in candidates(dense, None)[0]:
        if e.matrix is not None and not e.reason and (wanted is None or e.name in wanted):
            jobs.setdefault(f"{e.layer}.{e.matrix.weight}", []).append(e)
    weights = parameters(model)
    check_finite({name: weights[name] for name in jobs}, workers)

    def work(e: Entry, weight: Tensor) -> Tensor:
        assert e.matrix is not None
        return svd.spectrum(e.matrix.unroll(weight)).to(workers.device)

    found: dict[str, Tensor] = {}
    for name, owner, made in _shared_out(jobs, weights, workers, work):
        for i, e in enumerate(jobs[name]):
            assert e.matrix is not None
            empty = torch.empty(e.matrix.full_rank, dtype=torch.float64, device=workers.device)
            found[e.name] = workers.share(made[i] if made else empty, owner).cpu()
    return found


def _sharded(
    structure: nn.Module,
    shard: Callable[[nn.Module], nn.Module | None],
    model: nn.Module,
    routes: Mapping[str, Route],
    workers: Workers,
) -> nn.Module:
    """The low-rank model as `shard` leaves it, if `model` can go on in it."""
    new = shard(structure)
    new = structure if new is None else new
    if not isinstance(new, nn.Module):
        raise TypeError(f"shard() gave a {type(new).__name__}; let it return the model, or nothing")
    here, there = parameters(model), parameters(new)
    expected = {target for name in here for target in routes[name].targets}
    for name in sorted(expected ^ there.keys()):
        raise ValueError(f"shard() {'took away' if name in expected else 'added'} the parameter {name}")
    check_sharded(there)
    check_alike({routes[name].targets[0]: p for name, p in here.items() if routes[name].same}, there)
    for name in buffers(new).keys() - buffers(model).keys():
        raise ValueError(f"{name}: the low-rank model has this buffer, and the dense one no values for it")
    return new


def _shared_out(
    jobs: Mapping[str, list[Entry]],
    weights: Mapping[str, Tensor],
    workers: Workers,
    work: Callable[[Entry, Tensor], Found],
) -> Iterator[tuple[str, int, list[Found] | None]]:
    """Each weight gathered and worked on by one rank: its name, that rank, and there the results.

    It goes in turns, in which every rank works on one weight. The small ones come first: they have made
    room when the large ones need it.
    """
    costs = {name: sum(svd_cost(e.matrix) for e in entries if e.matrix) for name, entries in jobs.items()}
    names = sorted(jobs, key=costs.__getitem__, reverse=True)
    owners = balanced([costs[name] for name in names], workers.size)
    queues = [[n for n, o in zip(names, owners, strict=True) if o == r] for r in range(workers.size)]
    for turn in reversed(list(itertools.zip_longest(*queues))):
        mine, weight, made = "", None, None
        for owner, name in enumerate(turn):
            if name is not None:
                full = whole(weights[name])
                if owner == workers.rank:
                    mine, weight = name, full
                del full
        if weight is not None:
            made = [work(e, weight) for e in jobs[mine]]
            weight = None
        for owner, name in enumerate(turn):
            if name is not None:
                yield name, owner, made if name == mine else None


def _sent(
    e: Entry, made: tuple[Tensor, Tensor, float | None] | None, weight: Tensor, owner: int, workers: Workers
) -> tuple[Tensor, Tensor, float]:
    """The factors and the error of one matrix as its owner has made them."""
    if made is None:
        (down, up), error = empty_factors(e, local(weight)), None
    else:
        down, up, error = made
        down, up = (x.to(weight.dtype).contiguous() for x in (down, up))
    lost = torch.tensor([error or 0.0], dtype=torch.float64, device=workers.device)
    for x in (down, up, lost):
        workers.share(x, owner)
    return down, up, float(lost)


def _move_buffers(old: nn.Module, new: nn.Module) -> None:
    """And plain tensors, which a model on the meta device does not have either."""
    given = buffers(old)
    for path, _ in list(new.named_buffers(remove_duplicate=False)):
        owner, _, leaf = path.rpartition(".")
        new.get_submodule(owner)._buffers[leaf] = given[own_name(path)]
    modules = {name: module for name, _, module in named_modules(old)}
    for name, _, module in named_modules(new):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and name in modules:
                vars(module)[key] = vars(modules[name]).get(key)


def _retire(model: nn.Module) -> None:
    """Leave nothing in the old model that could be used by mistake."""

    def gone(*_: Any) -> NoReturn:
        raise RuntimeError("this model was rebuilt: go on with the one that switch.rebuild returned")

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update(dict.fromkeys(tensors))
    for module in {model, unwrap(model)}:
        module.register_forward_pre_hook(gone, prepend=True)
