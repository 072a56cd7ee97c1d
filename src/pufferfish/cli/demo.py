"""`pufferfish demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output_paths import Commands, refuse_locked


def add(commands: Commands) -> None:
    """The command's arguments."""
    demo = commands.add_parser(
        "demo", help="methods side by side on an emulated slow network, in a few minutes"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help="default: runs/demo"
    )
    demo.set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> int:
    from ..lab.bench.demo import demo

    refuse_locked(given.out)
    return demo(given.out)
