"""`pufferfish report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output_paths import Commands, refuse_no_file


def add(commands: Commands) -> None:
    """The command's arguments."""
    report = commands.add_parser("report", help="compare runs on one page, or as CSV, LaTeX, Markdown")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or folders that hold some")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html; other formats are printed"
    )
    form = report.add_mutually_exclusive_group()
    for name in ("csv", "latex", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name)
    report.add_argument(
        "--against", metavar="NAME", help="what the others are compared with (default bf16, else dense)"
    )
    report.add_argument(
        "--target", type=float, metavar="X", help="also: how long to this validation accuracy, as shown"
    )
    report.set_defaults(run=_report, form="html")


def _report(arguments: argparse.Namespace) -> None:
    from ..lab.report import report, write

    refuse_no_file(arguments.out)
    text = report(arguments.runs, arguments.form, against=arguments.against, target=arguments.target)
    out = arguments.out or (Path("report.html") if arguments.form == "html" else None)
    if out is None:
        print(text, end="")
    else:
        write(text, out)
        print(f"{out}: open it in a browser" if arguments.form == "html" else out)
