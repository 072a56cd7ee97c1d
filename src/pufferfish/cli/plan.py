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

from .arguments import check_output_file, number, whole
from .terminal import show

HELP = "show which layers become low-rank and what that saves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of a model, Hugging Face folder, or file.py with build()")
    rank = "0.25 (share of the full rank, the default), 8 (fixed), energy:0.9, stable, or budget:params=3e6 (also macs=, bytes=)"
    add("--rank", metavar="R", help=rank)
    add("--keep", nargs="+", metavar="PATTERN", help="name patterns of layers that stay dense")
    add("--only", nargs="+", metavar="PATTERN", help="name patterns; all other layers stay dense")
    add("--override", nargs="+", metavar="PATTERN=R", help="rank R for matching layers")
    add("--embed", metavar="R", help="rank R for embeddings, which stay dense by default")
    add("--frozen", action="store_true", help="also factorize weights that do not require a gradient")
    add(
        "--multiple",
        type=whole,
        metavar="N",
        help="round computed ranks to a multiple of N (default: 16; built-in models: 1)",
    )
    saving = "keep layers dense that would save less than this fraction of their parameters"
    add("--min-saving", type=number, default=0.0, metavar="F", help=saving)
    modes = "time the layers, dense and low-rank, in this mode (default: eager); those that would be slower stay dense"
    measure = parser.add_mutually_exclusive_group()
    measure.add_argument(
        "--measure", nargs="?", const="eager", choices=("eager", "compile", "graph"), help=modes
    )
    measure.add_argument(
        "--no-measure", action="store_true", help="do not time the layers, even with --device cuda"
    )
    link = "network link of each worker, such as 1gbit: a layer becomes low-rank if that shortens its time plus the time to send its gradients"
    add("--link", metavar="RATE", help=link)
    add("--device", default="cpu", help="device for the measurement (default: cpu)")
    add("--wide", action="store_true", help="print one row per layer, with all columns")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--out", type=Path, metavar="FILE", help="save the plan as JSON")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.tasks.plan_by_name import plan_by_name
    from ..planning.table import plan_parts, plan_table

    check_output_file(arguments.out)
    measured = arguments.measure or (arguments.device.startswith("cuda") and not arguments.no_measure)
    if arguments.link and not measured:
        raise ValueError("--link needs measured times; add --measure")
    plan, remarks = plan_by_name(
        arguments.model,
        rank=arguments.rank,
        keep=arguments.keep,
        only=arguments.only or (),
        overrides=dict(_parse_override(x) for x in arguments.override or ()),
        multiple=arguments.multiple,
        min_saving=arguments.min_saving,
        embed=arguments.embed,
        frozen=arguments.frozen,
        measure=False if arguments.no_measure else arguments.measure,
        link=_parse_link(arguments.link) if arguments.link else None,
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


def _parse_link(text: str) -> float:
    """Bytes of gradients per second that many workers average by a ring all-reduce, which sends each byte twice."""
    from ..lab.network.link_shape import LinkShape
    from ..measure.link import GOODPUT

    return LinkShape.parse(text).mbit * 1e6 / 8 * GOODPUT / 2


def _parse_override(text: str) -> tuple[str, Any]:
    pattern, separator, rank = text.partition("=")
    if not separator:
        raise ValueError(f"--override {text}: expected PATTERN=R, for example 'layer4.*=0.5'")
    return pattern, rank
