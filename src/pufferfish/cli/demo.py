"""`pufferfish demo`."""

from __future__ import annotations

import argparse

from .common import Commands


def add(commands: Commands) -> None:
    """The command's arguments."""
    demo = commands.add_parser("demo", help="plan, train, switch, train on, merge: in about a minute")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from ..lab.demo import demo

    demo()
