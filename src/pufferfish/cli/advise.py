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

import argparse
import os
from pathlib import Path

from .arguments import check_output_file, settings_from
from .terminal import show

HELP = "recommend how to train on a given network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="methods to try (default: bf16,int8,topk-0.01,powersgd-4; with one worker per machine also the local "
        "steps diloco-30,streaming-30x4,sparseloco-30)",
    )
    add(
        "--device", choices=("cpu", "cuda"), help="device (default: cuda if available; cpu on emulated hosts)"
    )
    add("--precision", choices=("fp32", "bf16"), help="data type (default: bf16 on cuda, fp32 on cpu)")
    add("--batch", type=int, metavar="N", help="global batch size (default: from example() or the recipe)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add("--recipe", help="short or paper, also with other values: short,rank=0.33 (default: short)")
    add("--keep", nargs="+", metavar="PATTERN", help="name patterns of layers that stay dense")
    add("--steps", type=int, metavar="N", help="steps of the whole run (default: from the task)")
    add("--out", type=Path, metavar="FILE", help="save the recommended low-rank plan")
    add("--wide", action="store_true", help="print all columns, however narrow the terminal is")
    add("--json", action="store_true", help="print the result as JSON")
    add("--check", action="store_true", help="run the three best methods and decide by their measured times")


def run(arguments: argparse.Namespace) -> None:
    import torch

    from ..lab.advise.run_advise import AdviseSettings, run_advise
    from ..lab.tasks.text import with_tokenizer

    check_output_file(arguments.out)
    emulated = arguments.check and "RANK" not in os.environ  # emulated hosts have no GPU
    device = arguments.device or ("cuda" if torch.cuda.is_available() and not emulated else "cpu")
    methods = None if arguments.methods is None else arguments.methods.split(",")
    task = with_tokenizer(arguments.task, arguments.data)
    settings = settings_from(AdviseSettings, arguments, task=task, device=device, methods=methods)
    run_advise(settings, lambda advice: show(advice.parts(), wide=arguments.wide))
