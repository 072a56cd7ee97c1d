"""Where the factors of a plan come from: an SVD, made here or shared by the workers; those of another model; NaN, to be loaded."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..distributed.ddp import Job
from ..distributed.workers import Workers
from ..layers import Matrix, own_name, unwrap
from ..layers.matrix import at_least_fp32
from ..planning import Entry, Plan, apply_rules, factorizable, svd
from .rewrite import Fill


def nan_factors(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors filled with NaN, to be loaded later."""
    U, V, error = empty_factors(e, W)
    return U.fill_(float("nan")), V.fill_(float("nan")), error


def empty_factors(e: Entry, like: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Uninitialized factors U and V with the dtype and device of `like`, and the known error."""
    assert e.matrix is not None
    assert e.rank is not None
    U = like.new_empty(e.matrix.blocks, e.matrix.m, e.rank, requires_grad=False)
    return U, like.new_empty(e.matrix.blocks, e.rank, e.matrix.n, requires_grad=False), e.error


def averaged_model(average: nn.Module, model: nn.Module) -> nn.Module:
    """The copy of `model` inside an average: torch's AveragedModel, or any module that holds it as its child `module`."""
    inner, expected = unwrap(average), _names(model)
    while _names(inner) != expected and "module" in inner._modules:
        inner = unwrap(inner.get_submodule("module"))
    return inner


def _names(model: nn.Module) -> set[str]:
    return {own_name(name) for name, _ in model.named_parameters()}


def in_basis_of(factors: Fill) -> Fill:
    """The factors of an average, given those of the model.

    Factors can be averaged only in a common basis, and an SVD of the average would rotate and reflect it. Its
    weights are projected on the model's factors instead: W̄ ≈ Ū V̄ with Ū = W̄ V⁺ and then V̄ = Ū⁺ W̄.
    """

    def fill(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
        _, V, _ = factors(e, W)
        W = at_least_fp32(W)
        U = W @ torch.linalg.pinv(at_least_fp32(V.to(W)))
        return U, torch.linalg.pinv(U) @ W, None

    return fill


def shared_ranks(job: Job, plan: Plan) -> Plan:
    """The plan with the ranks that its rules give for the weights of this moment, the same on all workers."""
    unresolved = job.workers.run_on_first(lambda: [e.name for e in plan.entries if e.rule is not None])
    spectra = shared_spectra(job, unresolved) if unresolved else None
    # Of rank 0, since measured times may differ between workers.
    return Plan.from_data(
        job.workers.run_on_first(lambda: (plan if spectra is None else apply_rules(plan, spectra)).as_data())
    )


def shared_factors(job: Job, plan: Plan) -> Fill:
    """The factors of a resolved plan. Each worker computes its share of the SVDs and broadcasts the results."""
    entries, workers = [e for e in plan.entries if e.rank is not None], job.workers
    owner = owners(entries, workers.size)
    weights = [job.layers[e.layer].get_parameter(e.matrix.weight) for e in entries if e.matrix]
    made = workers.run_on_all(
        lambda: [
            svd_of(e, w) if owner[e.name] == workers.rank else empty_factors(e, w)
            for e, w in zip(entries, weights, strict=True)
        ]
    )
    found = {
        e.name: broadcast_factors(made.pop(0), w, workers, owner[e.name])
        for e, w in zip(entries, weights, strict=True)
    }
    return lambda e, weight: found[e.name]


def shared_spectra(job: Job, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Singular values by entry name, as `pufferfish.planning.spectra` returns them; each computed by one worker.

    Args:
        names: entries to compute, if not all.
    """
    # Frozen weights do not change: they would only make ranks look settled.
    weights = [(e, w) for e, w in factorizable(job.dense, names) if names is not None or e.trainable]
    owner = owners((e for e, _ in weights), job.workers.size)
    own = job.workers.run_on_all(lambda: job.own_spectra(weights, owner))
    result = {}
    for e, _ in weights:
        assert e.matrix is not None
        values = own.get(e.name, torch.empty(e.matrix.full_rank, dtype=torch.float64))
        result[e.name] = job.workers.broadcast_tensor(values.to(job.workers.device), owner[e.name]).cpu()
    return result


def owners(entries: Iterable[Entry], size: int) -> dict[str, int]:
    """Rank of the worker that computes each matrix, by entry name; all matrices of one parameter have the same."""
    groups = list(by_weight(entries).values())
    owner = balance([group_cost(group) for group in groups], size)
    return {e.name: rank for group, rank in zip(groups, owner, strict=True) for e in group}


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


def by_weight(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group matrices by the name of the parameter that holds them."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        assert e.matrix is not None
        groups.setdefault(f"{e.layer}.{e.matrix.weight}", []).append(e)
    return groups


def group_cost(group: list[Entry]) -> float:
    """Approximate FLOPs of the SVDs of one parameter's matrices."""
    return sum(svd_cost(e.matrix) for e in group if e.matrix)


def svd_cost(x: Matrix) -> float:
    """Approximate FLOPs of one truncated SVD: the Gram matrix and its eigenvectors."""
    short, long = sorted((x.m, x.n))
    return x.blocks * (2.0 * short * short * long + 9.0 * short**3)


def svd_of(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Factors U, V and the relative error of one matrix, given the dense parameter that holds it."""
    assert e.matrix is not None
    assert e.rank is not None
    return svd.split(e.matrix.to_matrix(weight.detach()), e.rank)


def broadcast_factors(
    factors: tuple[Tensor, Tensor, float | None], weight: Tensor, workers: Workers, source: int
) -> tuple[Tensor, Tensor, float]:
    """Broadcast the factors U, V and the relative error of one matrix.

    Args:
        factors: from `svd_of` on the worker `source`, from `empty_factors` on the others.
        weight: gives dtype and device.
    """
    U, V, error = factors
    U, V = U.to(weight.dtype).contiguous(), V.to(weight.dtype).contiguous()
    error_tensor = torch.tensor([error or 0.0], dtype=torch.float64, device=weight.device)
    for x in (U, V, error_tensor):
        workers.broadcast_tensor(x, source)
    return U, V, float(error_tensor)
