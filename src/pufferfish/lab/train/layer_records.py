"""A run's layers for its records: their ranks, and their singular values before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.names import named_modules
from ...optim.factor_map import multiplied
from ...planning.plan import Plan
from ...planning.svd import spectrum

#: Of a layer's singular values so many are kept, from the first to the last.
MOST = 64


def layers(plan: Plan, before: Mapping[str, Tensor] | None = None) -> list[dict[str, Any]]:
    """A plan's layers for run.json, with the singular values that low-rank ones had `before`."""
    return [
        {
            "name": e.name, "shape": list(e.shape), "rank": e.rank, "full_rank": e.matrix.full_rank,
            "spectrum_before": sampled((before or {}).get(e.name) if e.rank else None), "spectrum_after": None,
        }
        for e in plan.entries
        if e.matrix is not None
    ]  # fmt: skip


def after(known: Sequence[Mapping[str, Any]], plan: Plan, model: nn.Module) -> list[dict[str, Any]]:
    """The same layers with the singular values that they have now."""
    modules = {name: m for name, _, m in named_modules(model)}
    now: dict[str, Tensor] = {}
    for e in plan.entries:
        if e.rank and e.matrix is not None:
            layer = modules[e.layer]
            down, up = (layer.get_parameter(name).detach() for name in (e.matrix.down, e.matrix.up))
            now[e.name] = torch.zeros(e.matrix.full_rank, dtype=torch.float64)
            now[e.name][: e.rank] = spectrum(multiplied(e.matrix, down, up))[: e.rank]
    return [{**x, "spectrum_after": sampled(now.get(x["name"]))} for x in known]


def sampled(values: Tensor | None) -> list[float] | None:
    """At most so many numbers, as shares of the first.

    >>> sampled(torch.tensor([4.0, 2.0, 1.0]))
    [1.0, 0.5, 0.25]
    >>> len(sampled(torch.ones(1000)))
    64
    """
    if values is None:
        return None
    places = torch.linspace(0, len(values) - 1, min(len(values), MOST)).round().long()
    shares = values[places] / values[0].clamp_min(torch.finfo(values.dtype).tiny)
    return [round(x, 6) for x in shares.tolist()]
