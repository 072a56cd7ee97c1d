"""`pufferfish plan`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .output_paths import Commands, refuse_no_file

PLAN_HELP = """\
Show what would be made low-rank, layer by layer, and what it saves. Nothing is trained or changed.

MODEL is a built-in reference model (%s), or a function that builds yours:
file.py:function or package.module:function. It returns

  model                      parameters and bytes
  model, batch               MACs and times too; the batch is a tensor, a tuple of arguments or a
                             dict of keyword arguments
  model, batch, loss_fn      loss_fn(model, batch) is one training step's loss: exact backward MACs

A built-in name alone prints the paper's hybrid plan: ratio 0.25, ranks not rounded, its full-rank layers kept.
"""


def add(commands: Commands) -> None:
    """The command's arguments."""
    plan = commands.add_parser(
        "plan",
        help="what would be made low-rank, and what it saves",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from ..lab.models import REFERENCES  # names only; building happens when a plan is asked for

    plan.description = PLAN_HELP % ", ".join(REFERENCES)
    plan.add_argument("model", metavar="MODEL")
    plan.add_argument(
        "--rank",
        metavar="R",
        help="0.25 (share of the full rank), 8 (fixed), energy:0.9, stable, budget:params=3e6 (or macs=, bytes=)",
    )
    plan.add_argument("--keep", nargs="+", metavar="PATTERN", help="layers that stay as they are")
    plan.add_argument("--only", nargs="+", metavar="PATTERN", help="the only layers that may change")
    plan.add_argument("--override", nargs="+", metavar="PATTERN=R", help="another rank for some layers")
    plan.add_argument("--multiple", type=int, metavar="N", help="round computed ranks to it (default 16)")
    plan.add_argument("--min-saving", type=float, default=0.0, metavar="F", help="share a layer must save")
    plan.add_argument(
        "--measure",
        nargs="?",
        const="eager",
        choices=("eager", "graph"),
        help="time the layers, as they run or in CUDA graphs; the slower ones stay dense",
    )
    plan.add_argument("--device", default="cpu", help="where to measure (default cpu)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--out", type=Path, metavar="FILE", help="also save the plan as JSON")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    from ..lab.models.plan_by_name import make_plan

    refuse_no_file(arguments.out)
    made, remarks = make_plan(
        arguments.model,
        rank=arguments.rank,
        keep=arguments.keep,
        only=arguments.only or (),
        overrides=dict(_pair(x) for x in arguments.override or ()),
        multiple=arguments.multiple,
        min_saving=arguments.min_saving,
        measure="graph" if arguments.measure == "graph" else arguments.measure == "eager",
        device=arguments.device,
    )
    if arguments.out:
        made.save(arguments.out)
    print(made.to_json() if arguments.json else made)
    for remark in remarks:
        print(f"\n{remark}", file=sys.stderr if arguments.json else sys.stdout)


def _pair(text: str) -> tuple[str, Any]:
    pattern, found, rank = text.partition("=")
    if not found:
        raise ValueError(f"--override {text}: write PATTERN=R, such as 'layer4.*=0.5'")
    return pattern, rank
