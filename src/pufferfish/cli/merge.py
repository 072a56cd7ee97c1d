"""Convert a low-rank checkpoint file back to dense, as pufferfish.merge_ does with a model."""

import argparse
from pathlib import Path

HELP = "convert a low-rank checkpoint back to dense"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="written by `pufferfish convert`")
    add("--plan", type=Path, metavar="FILE", help="default: the plan saved beside CHECKPOINT")
    add("--out", type=Path, required=True, metavar="PATH", help="output, in the format of CHECKPOINT")


def run(arguments: argparse.Namespace) -> None:
    from ..lowrank.convert import merge
    from ..planning.plan import Plan

    plan = merge(arguments.checkpoint, arguments.out, arguments.plan and Plan.load(arguments.plan))
    print(f"{arguments.out}: dense, {plan.before.parameters:,} parameters")
