"""Plans for models given by name or by a factory: what `pufferfish plan` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pufferfish as pf

from ...planning.profile import Example, run
from ...planning.rules import RankLike, as_rule
from . import REFERENCES
from .factory import LOSS, called, load_factory


def make_plan(
    model: str,
    *,
    rank: str | None,
    keep: Iterable[str] | None,
    only: Iterable[str],
    overrides: Mapping[str, str],
    multiple: int | None,
    min_saving: float,
    measure: bool | Literal["graph"],
    device: str,
) -> tuple[pf.Plan, list[str]]:
    """The plan, and what had to be left out."""
    rule = as_rule(parse_rank(rank) if rank else 0.25)
    rules = {pattern: parse_rank(text) for pattern, text in overrides.items()}
    weights = any(as_rule(r).needs_weights for r in (rule, *rules.values()))
    remarks: list[str] = []
    example: Example | None
    try:
        where = torch.device(device if weights or measure else "meta")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if model in REFERENCES:
        reference = REFERENCES[model]
        with where:
            net, example = reference.build(), reference.example()
        keep = reference.keep if keep is None else keep
        multiple = 1 if multiple is None else multiple
    else:
        net, example, remarks = _from_factory(model, where if where.type != "meta" else None)
        if measure and example is None:
            raise ValueError(f"{model}: --measure needs a batch; return (model, batch)")
    try:
        made = pf.plan(
            net,
            rule,
            keep=keep or (),
            only=only,
            overrides=rules,
            multiple=16 if multiple is None else multiple,
            min_saving=min_saving,
            example=example,
            measure=measure,
        )
    except Exception as error:
        if example is not None and not isinstance(error, ValueError):  # is it their batch that does not fit?
            called(model, "the model on its batch", run, net, example)
        raise
    if not made.resolved:
        made = pf.resolve(made, net)
        remarks.append(
            "The ranks are those that the weights give now, as they were built; training changes them."
        )
    return made, remarks


def parse_rank(text: str) -> RankLike:
    """`0.25`, `8`, `energy:0.9`, `stable`, `budget:params=3e6`.

    >>> parse_rank("0.25"), parse_rank("8"), parse_rank("energy:0.9")
    (0.25, 8, Energy(keep=0.9))
    """
    kind, _, value = text.partition(":")
    try:
        if kind == "stable":
            return pf.StableRank()
        if kind == "energy":
            return pf.Energy(float(value)) if value else pf.Energy()
        if kind == "budget":
            unit, _, amount = value.partition("=")
            return pf.Budget(**{unit: float(amount)})
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except (ValueError, TypeError) as error:
        if isinstance(error, ValueError) and str(error).startswith(("Energy", "Budget")):
            raise
        raise ValueError(
            f"rank {text!r}: write 0.25, 8, energy:0.9, stable or budget:params=3e6 (macs=, bytes=)"
        ) from None


def _from_factory(spec: str, device: torch.device | None) -> tuple[nn.Module, Example | None, list[str]]:
    made = load_factory(spec)()
    model, batch, loss_fn = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec} returned {type(model).__name__}, not a model or (model, batch[, loss_fn])")
    if device is not None:
        model = model.to(device)
        batch = pytree.tree_map_only(Tensor, lambda x: x.to(device), batch)
    if batch is None:
        return (
            model,
            None,
            ["No batch came with the model: MACs and times are left out. Return (model, batch)."],
        )
    if loss_fn is None:
        return model, batch, ["No loss_fn came with the model: backward is counted from the outputs' sum."]
    return model, lambda net: called(spec, LOSS, loss_fn, net, batch), []
