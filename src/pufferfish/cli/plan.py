"""Show which layers would become low-rank, at which ranks, and what that saves.
Nothing is trained or changed.

MODEL is a built-in reference model:
  vgg19, vgg19_one_fc, resnet18, resnet50, wide_resnet50_2, lstm, transformer,
  gpt, llama,
or your own file.py with a function build() that returns the model; also
file.py:function or package.module:function. If the file has data() or
example(), MACs are reported too, and layer times if they are measured; see
`pufferfish train --help`. Also a Hugging Face folder: its weights are read
only where a rank depends on them.

Columns: rank, "–" if the layer stays dense; weights, and MACs of a forward
pass, before→after; bytes, the layer's share of all gradient bytes afterwards.
A shape "256×64 in 4" is four blocks (groups, gates, experts), each factorized.
Ranks that are computed are rounded to multiples of 16; see --multiple.

A built-in model keeps the paper's full-rank layers unless --keep is given, and
its ranks are not rounded unless --multiple is given.

With --device cuda the layers are timed, and those that would be slower stay
dense: give --measure the mode that the job runs in.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from . import check_output_file
from .terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of a model, Hugging Face folder, or file.py with build()")
    rank = "0.25 (share of the full rank, the default), 8 (fixed), energy:0.9, stable, or budget:params=3e6 (also macs=, bytes=)"
    add("--rank", metavar="R", help=rank)
    add("--keep", nargs="+", metavar="PATTERN", help="name patterns of layers that stay dense")
    add("--override", nargs="+", metavar="PATTERN=R", help="rank R for matching layers")
    add("--embed", metavar="R", help="rank R for embeddings, which stay dense by default")
    add(
        "--multiple",
        type=int,
        metavar="N",
        help="round computed ranks to a multiple of N (default: 16; built-in models: 1)",
    )
    modes = "time the layers, dense and low-rank, in this mode (default: eager); those that would be slower stay dense"
    add("--measure", nargs="?", const="eager", choices=("eager", "compile", "graph"), help=modes)
    add("--device", default="cpu", help="device for the measurement (default: cpu)")
    add("--wide", action="store_true", help="print one row per layer, with all columns")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--out", type=Path, metavar="FILE", help="save the plan as JSON")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.tasks.plan_by_name import plan_by_name
    from ..planning.text import plan_parts, plan_table

    check_output_file(arguments.out)
    plan, remarks = plan_by_name(
        arguments.model,
        rank=arguments.rank,
        keep=arguments.keep,
        overrides=dict(_parse_override(x) for x in arguments.override or ()),
        multiple=arguments.multiple,
        embed=arguments.embed,
        measure=arguments.measure,
        device=arguments.device,
    )
    if arguments.out:
        plan.save(arguments.out)
    if arguments.json or arguments.wide:
        print(plan.to_json() if arguments.json else plan_table(plan))
        for remark in remarks:
            print(f"\n{remark}", file=sys.stderr if arguments.json else sys.stdout)
    else:
        show([*plan_parts(plan), *remarks])


def _parse_override(text: str) -> tuple[str, Any]:
    pattern, separator, rank = text.partition("=")
    if not separator:
        raise ValueError(f"--override {text}: expected PATTERN=R, for example 'layer4.*=0.5'")
    return pattern, rank
