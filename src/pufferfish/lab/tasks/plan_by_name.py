"""`plan_by_name`: the plan of a model given by name or by a user's file, as `pufferfish plan` shows it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import pufferfish as pf

from ...integrations.convert import dense_weights
from ...lowrank.state_dict import open_weights, resolve
from ...planning.profile import Example, run_example
from ...planning.rules import Fixed, RankLike, Rule, as_rule
from ...planning.timing import Mode
from ..models import REFERENCES
from .find_task import UserFile


def plan_by_name(
    model: str,
    *,
    rank: str | None,
    keep: Iterable[str] | None,
    overrides: Mapping[str, str],
    multiple: int | None,
    embed: str | None,
    measure: Mode | None,
    device: str,
) -> tuple[pf.Plan, list[str]]:
    """Return a model's plan and remarks about its limits; the arguments are those of the command line.

    Args:
        measure: None: layers are measured on a GPU, if there is a batch.
    """
    if multiple is None:
        multiple = 1 if model in REFERENCES else 16

    def rounded(text: str, option: str) -> Rule:
        rule = as_rule(parse_rank(text), option)
        return rule if isinstance(rule, Fixed) else as_rule(replace(rule, multiple=multiple), "--multiple")

    rule = rounded(rank or "0.25", "--rank")
    rules = {pattern: rounded(text, "--override") for pattern, text in overrides.items()}
    embed_rule = rounded(embed, "--embed") if embed else None
    weights = any(r.needs_weights for r in (rule, *rules.values(), *filter(None, [embed_rule])))
    remarks: list[str] = []
    example: Example | None
    file: UserFile | None = None
    folder = Path(model) if (Path(model) / "config.json").is_file() else None
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
    elif folder is not None:
        net, example, remarks = _model_of_folder(folder)
        if measure:
            raise ValueError(f"{folder}: --measure needs a batch; pass a file.py with build() and example()")
    else:
        if ":" not in model and not model.endswith(".py"):
            raise ValueError(
                f"{model!r} is not a built-in model ({', '.join(REFERENCES)}), a file.py nor a Hugging Face "
                "folder"
            )
        file = UserFile(model)
        net, example, remarks = _model_and_inputs(file, target if target.type != "meta" else None)
        if measure and example is None:
            raise ValueError(
                f"{file.name}: --measure needs a batch; add `def example(): return inputs, targets`"
            )
    try:
        plan = pf.plan(
            net,
            rule,
            keep=keep or (),
            overrides=rules,
            embed=embed_rule,
            example=example,
            measure=measure or ("eager" if on_gpu and example is not None else False),
        )
    except Exception as error:
        if file is not None and example is not None and not isinstance(error, ValueError):
            file.call("the model on its batch", run_example, net, example)  # does it fit?
        raise
    if not plan.resolved and folder is not None:
        from ...integrations.checkpoint_names import in_model_names

        with open_weights(dense_weights(folder)) as source:
            plan = resolve(in_model_names(source, net), plan)
    elif not plan.resolved:
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
            return pf.Budget(**{unit: float(amount)})  # type: ignore[arg-type]  # an option of none raises TypeError
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except (ValueError, TypeError) as error:
        if isinstance(error, ValueError) and str(error).startswith(("Energy", "Budget")):
            raise
        raise ValueError(
            f"invalid rank {text!r}: write 0.25, 8, energy:0.9, stable or budget:params=3e6 (macs=, bytes=)"
        ) from None


def _model_of_folder(folder: Path) -> tuple[nn.Module, None, list[str]]:
    """The model of a Hugging Face folder on the meta device, without inputs."""
    import transformers

    from ...integrations.checkpoint_names import meta_model
    from ...integrations.pretrained import build_on_meta

    if (model := meta_model(folder)) is not None:
        return model, None, []
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError:  # whose text lists hundreds of names
        raise ValueError(
            f"{folder}: its config.json does not name a model of transformers; write a file.py"
        ) from None
    model = build_on_meta(transformers.AutoModel.from_config, config)
    remark = (
        f"config.json does not name a class of transformers: this is {type(model).__name__}, without a head."
    )
    return model, None, [remark]


def _model_and_inputs(
    file: UserFile, device: torch.device | None
) -> tuple[nn.Module, Example | None, list[str]]:
    model, batch = file.build(), file.example()
    if batch is None:
        remark = "MACs and times are omitted. Add `def example(): return inputs, targets` to include them."
        return model, None, [f"{file.name} has neither data() nor example(): {remark}"]
    inputs = batch[:-1]
    if device is not None:
        model, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    return model, inputs, []
