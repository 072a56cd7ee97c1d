"""Convert a checkpoint to low rank, as pufferfish.factorize_ does with a model.

CHECKPOINT is a safetensors file, a torch.save file or a Hugging Face folder. A
folder is converted with its configuration and tokenizer;
pufferfish.integrations.transformers.from_pretrained loads the result.

examples:
  pufferfish convert model.safetensors --plan plan.json --out low.safetensors
  pufferfish convert llama --rank 0.25 --keep lm_head --out llama-low-rank
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planning import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="file or folder to convert")
    plan = parser.add_mutually_exclusive_group(required=True)
    plan.add_argument(
        "--plan", type=Path, metavar="FILE", help="plan saved by `pufferfish plan … --out FILE`"
    )
    rank = "instead of --plan, for a Hugging Face folder: rank of its layers, as in `pufferfish plan`"
    plan.add_argument("--rank", metavar="R", help=rank)
    add("--keep", nargs="+", metavar="PATTERN", help="with --rank: name patterns of layers that stay dense")
    add("--out", type=Path, required=True, metavar="PATH", help="output, in the format of CHECKPOINT")


def run(arguments: argparse.Namespace) -> None:
    from ..integrations.convert import convert

    plan = _plan(arguments)
    plan = convert(arguments.checkpoint, plan, arguments.out)
    before, after = plan.before.parameters, plan.after.parameters
    print(f"{arguments.out}: {before:,} → {after:,} parameters, {before / after:.2f}× smaller")


def _plan(arguments: argparse.Namespace) -> "Plan":
    from ..lab.tasks.plan_by_name import parse_rank
    from ..planning import Plan, plan

    if arguments.plan:
        if arguments.keep:
            raise ValueError("--keep works with --rank only; a plan already says which layers stay dense")
        return Plan.load(arguments.plan)
    rank = parse_rank(arguments.rank)
    folder: Path = arguments.checkpoint
    if not folder.exists():
        raise ValueError(f"{folder}: no such file or folder")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: --rank needs a Hugging Face folder with a config.json; pass --plan instead"
        )
    from ..integrations.checkpoint_names import meta_model

    model = meta_model(folder)
    if model is None:
        raise ValueError(f"{folder}: its config.json does not name a transformers class; pass --plan instead")
    return plan(model, rank, keep=arguments.keep or ())
