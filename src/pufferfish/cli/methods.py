"""List compression methods: what each sends, and how much less than fp32 on the wire."""

import argparse

from .terminal import show

HELP = "list compression methods and the bytes they send"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    examples = "powersgd-4, 'TopK(0.001)', file.py:Mine or 'package.module:Mine(rank=2)'"
    add(
        "methods", nargs="*", metavar="METHOD", help=f"for example {examples} (default: all built-in methods)"
    )
    sizes = "numbers of workers to show ratios for (default: 2 8 64)"
    add("--wide", action="store_true", help="print all columns, however narrow the terminal is")
    add("--workers", type=int, nargs="+", default=[2, 8, 64], metavar="N", help=sizes)


def run(arguments: argparse.Namespace) -> None:
    from ..lab.report.methods_table import methods_parts, parse_methods

    show(methods_parts(parse_methods(arguments.methods), arguments.workers), wide=arguments.wide)
