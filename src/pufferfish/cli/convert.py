"""`pufferfish convert` and `merge`: checkpoint files."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output_paths import Commands


def add(commands: Commands) -> None:
    """The command's arguments."""
    convert = commands.add_parser(
        "convert", help="make a checkpoint low-rank", description="What factorize_ does, on checkpoint files."
    )
    convert.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a safetensors or torch.save file, or a folder"
    )
    convert.add_argument("--plan", type=Path, required=True, help="from `pufferfish plan … --out FILE`")
    convert.add_argument("--out", type=Path, required=True, help="of the same kind as CHECKPOINT")
    convert.set_defaults(run=_convert)

    merge = commands.add_parser(
        "merge",
        help="make a low-rank checkpoint dense again",
        description="What merge_ does, on checkpoint files.",
    )
    merge.add_argument("checkpoint", metavar="CHECKPOINT")
    merge.add_argument("--plan", type=Path, help="default: the one that lies beside the checkpoint")
    merge.add_argument("--out", type=Path, required=True)
    merge.set_defaults(run=_merge)


def _convert(arguments: argparse.Namespace) -> None:
    from ..lowrank.convert import convert
    from ..planning.plan import Plan

    plan = convert(arguments.checkpoint, Plan.load(arguments.plan), arguments.out)
    before, after = plan.before.parameters, plan.after.parameters
    print(f"{arguments.out}: {before:,} → {after:,} parameters, {before / after:.2f}× smaller")


def _merge(arguments: argparse.Namespace) -> None:
    from ..lowrank.convert import merge
    from ..planning.plan import Plan

    plan = merge(arguments.checkpoint, arguments.out, arguments.plan and Plan.load(arguments.plan))
    print(f"{arguments.out}: dense again, {plan.before.parameters:,} parameters")
