"""The layers' spectra and SVDs, each computed once in the whole job: shared out by cost, then sent to all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layers.names import named_modules
from ..lowrank.factorize import Fill, by_svd, empty_factors
from ..planning import svd
from ..planning.candidates import candidates
from ..planning.plan import Entry, Plan
from .workers import Workers, balanced, svd_cost


def spectra(model: nn.Module, workers: Workers, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """`planning.spectra` on many ranks."""
    entries, live = candidates(model, None)
    wanted = None if names is None else set(names)
    entries = [
        e for e in entries if e.matrix is not None and not e.reason and (wanted is None or e.name in wanted)
    ]
    owned = owners(entries, workers.size)
    found = {}
    for e, owner in owned:  # all ranks compute at once
        assert e.matrix is not None
        weight = live[e.layer].get_parameter(e.matrix.weight).detach()
        found[e.name] = torch.full((e.matrix.full_rank,), torch.nan, dtype=torch.float64)
        if owner == workers.rank and torch.isfinite(weight).all():
            found[e.name] = svd.spectrum(e.matrix.unroll(weight))
    for e, owner in owned:  # and then tell
        found[e.name] = workers.share(found[e.name].to(workers.device), owner).cpu()
    for name, values in found.items():  # after the last message: every rank raises, none waits
        if values.isnan().any():
            raise ValueError(f"{name}: the weight contains inf or NaN; nothing was changed")
    return found


def factors(model: nn.Module, plan: Plan, workers: Workers) -> Fill:
    """What `convert` fills the factors with."""
    layers = {name: m for name, _, m in named_modules(model)}
    entries = [e for e in plan if e.rank is not None]
    owner = {e.name: rank for e, rank in owners(entries, workers.size)}
    mine = {
        e.name: by_svd(e, layers[e.layer].get_parameter(e.matrix.weight))
        for e in entries
        if e.matrix is not None and owner[e.name] == workers.rank
    }
    del layers  # no reference to a dense layer outlives the switch

    def fill(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
        if e.name in mine:
            down, up, error = mine.pop(e.name)
            down, up = (x.to(weight.dtype).contiguous() for x in (down, up))
        else:
            (down, up), error = empty_factors(e, weight), None
        lost = torch.tensor([error or 0.0], dtype=torch.float64, device=weight.device)
        for x in (down, up, lost):
            workers.share(x, owner[e.name])
        return down, up, float(lost)

    return fill


def owners(entries: list[Entry], size: int) -> list[tuple[Entry, int]]:
    """Which rank takes which matrix."""
    return list(zip(entries, balanced([svd_cost(e.matrix) for e in entries if e.matrix], size), strict=True))
