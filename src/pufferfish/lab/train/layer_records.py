"""`layer_records`: a plan's layers for run.json, with ranks and singular values before and after training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.names import named_modules
from ...local.all_finite import all_finite
from ...planning.plan import Plan
from ...planning.svd import spectrum

#: Singular values recorded for each layer, evenly spaced from the first to the last.
MAX_VALUES = 64


def layer_records(plan: Plan, spectra: Mapping[str, Tensor] | None = None) -> list[dict[str, Any]]:
    """Return a record of each layer of `plan`.

    Args:
        spectra: singular values of low-rank layers before the switch, by name.
    """
    return [
        {
            "name": e.name, "shape": list(e.shape), "rank": e.rank, "full_rank": e.matrix.full_rank,
            "spectrum_before": sample_spectrum((spectra or {}).get(e.name) if e.rank else None), "spectrum_after": None,
        }
        for e in plan.entries
        if e.matrix is not None
    ]  # fmt: skip


def with_final_spectra(
    records: Sequence[Mapping[str, Any]], plan: Plan, model: nn.Module
) -> list[dict[str, Any]]:
    """Return the records with the singular values that the layers of `model` have now."""
    modules = {name: m for name, _, m in named_modules(model)}
    spectra: dict[str, Tensor] = {}
    for e in plan.entries:
        if e.rank and e.matrix is not None:
            layer = modules[e.layer]
            down, up = (layer.get_parameter(name).detach() for name in (e.matrix.down, e.matrix.up))
            product = e.matrix.product_fp32(down, up)
            if not all_finite([product]):  # the run has diverged
                continue
            spectra[e.name] = torch.zeros(e.matrix.full_rank, dtype=torch.float64)
            spectra[e.name][: e.rank] = spectrum(product)[: e.rank]
    return [{**x, "spectrum_after": sample_spectrum(spectra.get(x["name"]))} for x in records]


def sample_spectrum(values: Tensor | None) -> list[float] | None:
    """Return at most `MAX_VALUES` singular values, relative to the largest.

    >>> sample_spectrum(torch.tensor([4.0, 2.0, 1.0]))
    [1.0, 0.5, 0.25]
    >>> len(sample_spectrum(torch.ones(1000)))
    64
    """
    if values is None:
        return None
    indices = torch.linspace(0, len(values) - 1, min(len(values), MAX_VALUES)).round().long()
    relative = values[indices] / values[0].clamp_min(torch.finfo(values.dtype).tiny)
    return [round(x, 6) for x in relative.tolist()]
