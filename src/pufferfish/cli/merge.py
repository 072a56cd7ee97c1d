"""Convert a low-rank checkpoint back to dense, as pufferfish.merge_ does with
a model.

CHECKPOINT was written by `pufferfish convert`, by pufferfish.save, or by
save_pretrained of a low-rank transformers model. The from_pretrained of
transformers loads the resulting dense folder.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="low-rank file or folder")
    add("--plan", type=Path, metavar="FILE", help="plan (default: the one saved in or beside CHECKPOINT)")
    add("--out", type=Path, required=True, metavar="PATH", help="output, in the format of CHECKPOINT")


def run(arguments: argparse.Namespace) -> None:
    from ..integrations.convert import merge
    from ..planning import Plan

    plan = arguments.plan and Plan.load(arguments.plan)
    plan = merge(arguments.checkpoint, arguments.out, plan)
    print(f"{arguments.out}: dense, {plan.before.parameters:,} parameters")
