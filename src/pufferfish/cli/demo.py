"""Compare a few training methods on an emulated slow network, in a few minutes on a CPU."""

import argparse
from pathlib import Path

from .arguments import check_output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "output folder (default: runs/demo)"
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> int:
    from ..lab.bench.demo import demo

    check_output_folder(arguments.out)
    return demo(arguments.out)
