"""Compare runs on one HTML page, or in Markdown tables."""

import argparse
from pathlib import Path

from . import check_output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, or folder that contains runs")
    out = "output file (default: report.html; with --markdown standard output)"
    add("--out", type=Path, metavar="FILE", help=out)
    add("--markdown", action="store_true", help="write Markdown")
    add(
        "--against", metavar="NAME", help="method to compare the others with (default: bf16, otherwise dense)"
    )


def run(arguments: argparse.Namespace) -> None:
    from ..lab.report import report, write

    check_output_file(arguments.out)
    text = report(arguments.runs, markdown=arguments.markdown, against=arguments.against)
    out = arguments.out or (None if arguments.markdown else Path("report.html"))
    if out is None:
        print(text, end="")
    else:
        write(text, out)
        print(f"{out}: open it in a browser" if not arguments.markdown else out)
