"""`pufferfish advise`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .output_paths import Commands, refuse_no_file

ADVISE_HELP = """\
Say which way to train pays on a network: plain DDP, 16 bits, compression, low rank, or low rank and compression. What a
step computes is measured here; the steps on the network are predicted, by the step and for the whole run.

TASK is one of pufferfish train's, or a function that builds your model, file.py:function. It returns
(model, batch, loss_fn): loss_fn(model, batch) is the loss of one worker's step.

  pufferfish advise digits --network 100mbit --nodes 4 --check      emulated hosts, the best three are run
  pufferfish advise mine.py:factory --network 10gbit --nodes 16 --per-node 8 --out plan.json
  torchrun --nproc-per-node 8 -m pufferfish advise mine.py:factory --network real --check
"""


def add(commands: Commands) -> None:
    """The command's arguments."""
    advise = commands.add_parser(
        "advise",
        help="which way to train pays on a network",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=ADVISE_HELP,
    )
    advise.add_argument("task", metavar="TASK")
    advise.add_argument(
        "--network", metavar="LINK", help="100mbit, 1gbit,delay=5ms, or real: that of this torchrun job"
    )
    advise.add_argument("--nodes", type=int, metavar="N", help="machines (under torchrun: the job's)")
    advise.add_argument(
        "--per-node", type=int, metavar="M", help="workers on each (default 1; under torchrun: the job's)"
    )
    advise.add_argument("--engine", default="ddp", metavar="E", help="ddp (default) or fsdp2")
    advise.add_argument(
        "--methods", metavar="A,B", help="compression methods to try (default bf16,int8,topk-0.01,powersgd-4)"
    )
    advise.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one, but for emulated hosts"
    )
    advise.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on cuda, else fp32"
    )
    advise.add_argument("--batch", type=int, metavar="N", help="of all workers, in place of the recipe's")
    advise.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    advise.add_argument("--recipe", help="of a task: short (default) or paper")
    advise.add_argument("--keep", nargs="+", metavar="PATTERN", help="layers that stay full-rank in any case")
    advise.add_argument(
        "--steps", type=int, metavar="N", help="of the whole run, for its time (a task knows them)"
    )
    advise.add_argument("--out", type=Path, metavar="FILE", help="save the plan that is advised")
    advise.add_argument("--json", action="store_true", help="print the advice as JSON")
    advise.add_argument(
        "--check",
        action="store_true",
        help="run the best three, on emulated hosts or in this job, and advise by the clock",
    )
    advise.set_defaults(run=_advise)


def _advise(arguments: argparse.Namespace) -> None:
    import torch

    from ..lab.advise.command import Asked, run

    refuse_no_file(arguments.out)
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "command")}
    emulated = arguments.check and "RANK" not in os.environ  # hosts, which have CPUs
    given["device"] = arguments.device or ("cuda" if torch.cuda.is_available() and not emulated else "cpu")
    given["precision"] = arguments.precision or ("bf16" if given["device"] == "cuda" else "fp32")
    given["methods"] = None if arguments.methods is None else arguments.methods.split(",")
    run(Asked(**{name: value for name, value in given.items() if value is not None}))
