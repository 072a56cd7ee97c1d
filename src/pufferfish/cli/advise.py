"""Recommend how to train on a given network: plain DDP, bf16 gradients, gradient
compression, low rank, or low rank with compression. The computation of a step
is measured on this machine; step and run times on the network are predicted.

TASK is a task of `pufferfish train`, such as digits, or your own file.py with
build() and either data() or example(), which returns one worker's batch.

examples:
  # predict, then run the three best on emulated hosts
  pufferfish advise digits --network 100mbit --nodes 4 --check

  # predict for 16 machines with 8 workers each, and save the low-rank plan
  pufferfish advise my_model.py --network 10gbit --nodes 16 --per-node 8 \\
      --out plan.json

  # measure the network of a torchrun job, and run the three best on it
  torchrun --nproc-per-node 8 -m pufferfish advise my_model.py \\
      --network real --check
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from . import check_output_file, default_device, settings_from
from .terminal import show

if TYPE_CHECKING:
    import argparse

    from . import Parser


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("task", metavar="TASK", help="what to train, see above")
    add(
        "--network",
        metavar="LINK",
        help="100mbit, '1gbit,delay=5ms', or real: the network of this torchrun job",
    )
    add("--nodes", type=int, metavar="N", help="number of machines (torchrun: taken from the job)")
    add("--per-node", type=int, metavar="M", help="workers per machine (default: 1; torchrun: from the job)")
    add(
        "--methods",
        metavar="A,B",
        help="methods to try (default: bf16,int8,topk(0.01),powersgd(4); with one worker per machine also local steps)",
    )
    add("--batch", type=int, metavar="N", help="global batch size (default: from example() or the recipe)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add("--recipe", help="short or paper, also with other values: short,rank=0.33 (default: short)")
    add("--keep", nargs="+", metavar="PATTERN", help="name patterns of layers that stay dense")
    add("--steps", type=int, metavar="N", help="steps of the whole run (default: from the task)")
    add("--out", type=Path, metavar="FILE", help="save the recommended low-rank plan")
    add("--json", action="store_true", help="print the result as JSON")
    add("--check", action="store_true", help="run the three best methods and decide by their measured times")
    text = "device (default: cuda if available and the machines are not emulated)"
    parser.add_rare("--device", choices=("cpu", "cuda"), help=text)
    text = "data type (default: bf16 on cuda, fp32 on cpu)"
    parser.add_rare("--precision", choices=("fp32", "bf16"), help=text)
    parser.add_rare("--wide", action="store_true", help="print all columns, however narrow the terminal is")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.advise.run_advise import AdviseSettings, run_advise
    from ..lab.method_name import split_names
    from ..lab.tasks.find_task import with_tokenizer

    check_output_file(arguments.out)
    device = arguments.device or default_device(arguments.check and "RANK" not in os.environ)
    methods = None if arguments.methods is None else split_names(arguments.methods)
    task = with_tokenizer(arguments.task, arguments.data)
    settings = settings_from(AdviseSettings, arguments, task=task, device=device, methods=methods)
    run_advise(settings, lambda advice: show(advice.parts(), wide=arguments.wide))
