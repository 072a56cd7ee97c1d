"""Compare runs as one HTML page, or as CSV, LaTeX or Markdown tables."""

import argparse
from pathlib import Path

from .arguments import check_output_file, number

HELP = "compare runs as an HTML page, CSV, LaTeX or Markdown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, or folder that contains runs")
    out = "output file (default: report.html for HTML, standard output for other formats)"
    add("--out", type=Path, metavar="FILE", help=out)
    form = parser.add_mutually_exclusive_group()
    for name, label in (("csv", "CSV"), ("latex", "LaTeX"), ("markdown", "Markdown")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"write {label}")
    add("--title", metavar="TEXT", help="heading of the HTML page")
    add(
        "--against", metavar="NAME", help="method to compare the others with (default: bf16, otherwise dense)"
    )
    target = "also report the time to reach this validation score, in the unit of the report"
    add("--target", type=number, metavar="X", help=target)
    parser.set_defaults(form="html")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.report import report, write

    check_output_file(arguments.out)
    title = {} if arguments.title is None else {"title": arguments.title}
    text = report(arguments.runs, arguments.form, against=arguments.against, target=arguments.target, **title)
    out = arguments.out or (Path("report.html") if arguments.form == "html" else None)
    if out is None:
        print(text, end="")
    else:
        write(text, out)
        print(f"{out}: open it in a browser" if arguments.form == "html" else out)
