"""Spectra and SVDs of a model's weights, each computed by one worker and broadcast to the others."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..layers import Matrix
from ..layers.names import named_modules
from ..lowrank.factorize import svd_factors
from ..lowrank.rewrite import Fill, empty_factors
from ..planning.entries import Entry
from ..planning.plan import Plan, factorizable, matrix_spectrum
from .workers import Workers

#: Given all matrices and the rank that owns each of them, by entry name: calls a function with the matrices of this
#: worker and their whole weights, and returns the results by entry name.
Compute = Callable[[list[Entry], dict[str, int], Callable[[Entry, Tensor], Tensor]], dict[str, Tensor]]


def spectra(
    model: nn.Module,
    workers: Workers,
    names: Iterable[str] | None = None,
    compute: Compute | None = None,
) -> dict[str, Tensor]:
    """Compute `pufferfish.spectra` on all workers of a job.

    Args:
        model: dense model, the same on all workers.
        names: entries to compute, if not all.
        compute: supplies the weights where `model` is only an outline of a sharded model.
    """
    # Frozen weights do not change: they would only make ranks look settled.
    weights = [(e, w) for e, w in factorizable(model, names) if names is not None or e.trainable]
    entries = [e for e, _ in weights]
    owner = owners(entries, workers.size)

    def on_this_worker() -> dict[str, Tensor]:
        if compute is not None:
            return compute(entries, owner, matrix_spectrum)
        return {e.name: matrix_spectrum(e, weight) for e, weight in weights if owner[e.name] == workers.rank}

    own = workers.run_on_all(on_this_worker)
    result = {}
    for e in entries:
        assert e.matrix is not None
        values = own.get(e.name, torch.empty(e.matrix.full_rank, dtype=torch.float64))
        result[e.name] = workers.broadcast_tensor(values.to(workers.device), owner[e.name]).cpu()
    return result


def factors(model: nn.Module, plan: Plan, workers: Workers) -> Fill:
    """The factors of a resolved plan, for a `Rewrite`. Each worker computes its share of the SVDs."""
    entries = [e for e in plan if e.rank is not None]
    owner = owners(entries, workers.size)

    layers = {name: module for name, _, module in named_modules(model)}
    weights = {e.name: layers[e.layer].get_parameter(e.matrix.weight) for e in entries if e.matrix}
    own = workers.run_on_all(
        lambda: {e.name: svd_of(e, weights[e.name]) for e in entries if owner[e.name] == workers.rank}
    )
    found = {
        e.name: broadcast_factors(e, own.pop(e.name, None), weights[e.name], workers, owner[e.name])
        for e in entries
    }
    return lambda e, weight: found[e.name]


def svd_of(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors of one matrix, given the dense parameter that holds it."""
    assert e.matrix is not None
    return svd_factors(e, e.matrix.to_matrix(weight.detach()))


def broadcast_factors(
    e: Entry, own: tuple[Tensor, Tensor, float | None] | None, weight: Tensor, workers: Workers, source: int
) -> tuple[Tensor, Tensor, float]:
    """Broadcast the factors U, V and the relative error of one matrix.

    Args:
        own: from `svd_of`, on the worker `source`.
        weight: gives dtype and device.
    """
    U, V, error = (*empty_factors(e, weight), None) if own is None else own
    U, V = (x.to(weight.dtype).contiguous() for x in (U, V))
    error_tensor = torch.tensor([error or 0.0], dtype=torch.float64, device=weight.device)
    for x in (U, V, error_tensor):
        workers.broadcast_tensor(x, source)
    return U, V, float(error_tensor)


def owners(entries: Iterable[Entry], size: int) -> dict[str, int]:
    """Rank of the worker that computes each matrix, by entry name; all matrices of one parameter have the same."""
    costs: dict[str, float] = {}
    parameter: dict[str, str] = {}
    for e in entries:
        assert e.matrix is not None
        parameter[e.name] = f"{e.layer}.{e.matrix.weight}"
        costs[parameter[e.name]] = costs.get(parameter[e.name], 0.0) + svd_cost(e.matrix)
    owner = dict(zip(costs, balance(list(costs.values()), size), strict=True))
    return {name: owner[weight] for name, weight in parameter.items()}


def svd_cost(x: Matrix) -> float:
    """Approximate FLOPs of one truncated SVD: the Gram matrix and its eigenvectors."""
    short, long = sorted((x.m, x.n))
    return x.blocks * (2.0 * short * short * long + 9.0 * short**3)


def balance(costs: Sequence[float], workers: int) -> list[int]:
    """Assign tasks to workers: the largest first, each to the worker with the least load.

    >>> balance([5, 4, 3, 3], 2)
    [0, 1, 1, 0]
    """
    load = [0.0] * workers
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = min(range(workers), key=load.__getitem__)
        load[owner[i]] += costs[i]
    return owner
