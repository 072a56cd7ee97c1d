"""Compare a few training methods on an emulated slow network, in a few minutes on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import check_output_folder

if TYPE_CHECKING:
    from ..lab.bench import BenchSettings

LINK = "200mbit"
METHODS = ("powersgd(4)", "pufferfish", "pufferfish+powersgd(4)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "output folder (default: runs/demo)"
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> int:
    from ..lab.bench import run_bench

    check_output_folder(arguments.out)
    print(
        f"Training handwritten digits on four workers of this machine, each behind a {LINK} link: dense DDP, bf16 gradients,\n"
        f"PowerSGD, Pufferfish, and Pufferfish with PowerSGD. Five short runs, then the steps of all methods are timed.\n"
        f"Results are written to {arguments.out}; rerun the same command to resume an interrupted demo.\n",
        flush=True,
    )
    return run_bench(demo_settings(), arguments.out)


def demo_settings() -> BenchSettings:
    """The settings of the demo: digits on four workers behind slow links.

    >>> demo_settings().methods
    ('dense', 'bf16', 'powersgd(4)', 'pufferfish', 'pufferfish+powersgd(4)')
    """
    from ..lab.bench import BenchSettings

    return BenchSettings(task="digits", methods=METHODS, epochs=8, nodes=4, network=LINK)
