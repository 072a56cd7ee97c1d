"""`pufferfish methods`."""

from __future__ import annotations

import argparse

from .output_paths import Commands


def add(commands: Commands) -> None:
    """The command's arguments."""
    methods = commands.add_parser(
        "methods",
        help="what each compression method sends, and saves",
        description="What each compression method sends, and how many times fewer bytes that makes on the wire.",
    )
    methods.add_argument(
        "methods",
        nargs="*",
        metavar="METHOD",
        help="such as 'TopK(0.001)', file.py:Mine or 'package.module:Mine(rank=2)' (default: all of Pufferfish's)",
    )
    methods.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[2, 8, 64],
        metavar="N",
        help="for these numbers of workers (2 8 64)",
    )
    methods.set_defaults(run=_methods)


def _methods(arguments: argparse.Namespace) -> None:
    from ..lab.report.methods_table import named, table

    print(table(named(arguments.methods), arguments.workers))
