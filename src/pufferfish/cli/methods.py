"""Say what names of methods mean, and how many bytes their compression sends.

A name is model(options)+exchange(options). Without names, all models, local
steps and compression methods of the package are listed.

examples:
  pufferfish methods
  pufferfish methods 'pufferfish(rank=0.5,at=0.1)+powersgd(8)'
  pufferfish methods 'topk(0.001)' 'file.py:Mine(rank=2)' --workers 4 16
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .terminal import show

if TYPE_CHECKING:
    import argparse

    from . import Parser


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="as in --method of `pufferfish train` (default: all)")
    sizes = "numbers of workers to show ratios for (default: 2 8 64)"
    add("--workers", type=int, nargs="+", default=[2, 8, 64], metavar="N", help=sizes)
    add("--wide", action="store_true", help="print all columns, however narrow the terminal is")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.report.methods_table import methods_parts

    show(methods_parts(arguments.names, arguments.workers), wide=arguments.wide)
