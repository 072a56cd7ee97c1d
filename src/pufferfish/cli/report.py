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
    form.add_argument(
        "--watch", action="store_true", help="update the page while runs continue, until Ctrl-C"
    )
    add("--title", metavar="TEXT", help="heading of the HTML page")
    add(
        "--against", metavar="NAME", help="method to compare the others with (default: bf16, otherwise dense)"
    )
    target = "also report the time to reach this validation score, in the unit of the report"
    add("--target", type=number, metavar="X", help=target)
    parser.set_defaults(form="html")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.report import write
    from ..lab.report.watch import watch

    check_output_file(arguments.out)
    out = arguments.out or (Path("report.html") if arguments.form == "html" else None)
    if out is None:
        print(_text(arguments), end="")
    elif arguments.watch:
        print(f"{out}: open it in a browser; it is updated until Ctrl-C", flush=True)
        watch(arguments.runs, lambda refresh: write(_text(arguments, refresh), out), print)
        print(f"\n{out}: no longer updated")
    else:
        write(_text(arguments), out)
        print(f"{out}: open it in a browser" if arguments.form == "html" else out)


def _text(arguments: argparse.Namespace, refresh: float | None = None) -> str:
    from ..lab.report import report

    title = {} if arguments.title is None else {"title": arguments.title}
    return report(
        arguments.runs, arguments.form, against=arguments.against, target=arguments.target, refresh=refresh, **title
    )  # fmt: skip
