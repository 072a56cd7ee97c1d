"""`plan_by_name`: the plan of a model given by name or by a factory, as `pufferfish plan` shows it."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pufferfish as pf

from ...planning.profile import Example, run_example
from ...planning.rules import RankLike, as_rule
from ...planning.timing import Mode
from . import REFERENCES
from .load_factory import LOSS_CALL, call_user_code, load_factory


def plan_by_name(
    model: str,
    *,
    rank: str | None,
    keep: Iterable[str] | None,
    only: Iterable[str],
    overrides: Mapping[str, str],
    multiple: int | None,
    min_saving: float,
    embed: str | None,
    frozen: bool,
    measure: Mode | bool | None,
    link: float | None,
    device: str,
) -> tuple[pf.Plan, list[str]]:
    """Return a model's plan and remarks about its limits; the arguments are those of the command line.

    Args:
        measure: None: layers are measured on a GPU, if there is a batch.
        link: bytes of gradients per second that the workers average.
    """
    rule = as_rule(parse_rank(rank) if rank else 0.25)
    rules = {pattern: parse_rank(text) for pattern, text in overrides.items()}
    embed_rule = as_rule(parse_rank(embed), "embed") if embed else None
    weights = any(as_rule(r).needs_weights for r in (rule, *rules.values(), *filter(None, [embed_rule])))
    remarks: list[str] = []
    example: Example | None
    try:
        on_gpu = torch.device(device).type == "cuda"
        target = torch.device(device if weights or measure or (measure is None and on_gpu) else "meta")
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if model in REFERENCES:
        reference = REFERENCES[model]
        with target:
            net, example = reference.build(), reference.example()
        keep = reference.keep if keep is None else keep
        multiple = 1 if multiple is None else multiple
    else:
        net, example, remarks = _from_factory(model, target if target.type != "meta" else None)
        if measure and example is None:
            raise ValueError(f"{model}: --measure needs a batch; return (model, batch) from the function")
    if measure is None:
        measure = "eager" if on_gpu and example is not None else False
    try:
        plan = pf.plan(
            net,
            rule,
            keep=keep or (),
            only=only,
            overrides=rules,
            multiple=16 if multiple is None else multiple,
            min_saving=min_saving,
            embed=embed_rule,
            frozen=frozen,
            example=example,
            measure=measure,
            link=link,
        )
    except Exception as error:
        if example is not None and not isinstance(error, ValueError):  # does their batch fit the model?
            call_user_code(model, "the model on its batch", run_example, net, example)
        raise
    if not plan.resolved:
        plan = pf.resolve(plan, net)
        remarks.append("The ranks are those of the initial weights; they change during training.")
    return plan, remarks


def parse_rank(text: str) -> RankLike:
    """Parse a rank: `0.25`, `8`, `energy:0.9`, `stable` or `budget:params=3e6`.

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
            f"invalid rank {text!r}: write 0.25, 8, energy:0.9, stable or budget:params=3e6 (macs=, bytes=)"
        ) from None


def _from_factory(spec: str, device: torch.device | None) -> tuple[nn.Module, Example | None, list[str]]:
    built = load_factory(spec)()
    model, batch, loss_fn = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{spec} must return a model or (model, batch[, loss_fn]), got {type(model).__name__}"
        )
    if device is not None:
        model = model.to(device)
        batch = pytree.tree_map_only(Tensor, lambda x: x.to(device), batch)
    if batch is None:
        remark = "returned no batch: MACs and times are omitted. Return (model, batch) to include them."
        return model, None, [f"{spec} {remark}"]
    if loss_fn is None:
        remark = "returned no loss_fn: backward MACs are those of the sum of the outputs."
        return model, batch, [f"{spec} {remark}"]
    return model, lambda net: call_user_code(spec, LOSS_CALL, loss_fn, net, batch), []
