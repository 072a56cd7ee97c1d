"""Convert a checkpoint file to low rank, as pufferfish.factorize_ does with a model."""

import argparse
from pathlib import Path

HELP = "convert a checkpoint to low rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="safetensors file, torch.save file or folder")
    add("--plan", type=Path, required=True, metavar="FILE", help="saved by `pufferfish plan … --out FILE`")
    add("--out", type=Path, required=True, metavar="PATH", help="output, in the format of CHECKPOINT")


def run(arguments: argparse.Namespace) -> None:
    from ..lowrank.convert import convert
    from ..planning.plan import Plan

    plan = convert(arguments.checkpoint, Plan.load(arguments.plan), arguments.out)
    before, after = plan.before.parameters, plan.after.parameters
    print(f"{arguments.out}: {before:,} → {after:,} parameters, {before / after:.2f}× smaller")
