"""`pufferfish network`."""

from __future__ import annotations

import argparse

from .output_paths import Commands


def add(commands: Commands) -> None:
    """The command's arguments."""
    network = commands.add_parser("network", help="remove what killed runs on emulated networks left")
    network.add_argument("action", choices=["clean"])
    network.set_defaults(run=_network)


def _network(arguments: argparse.Namespace) -> None:
    from ..lab.network import clean

    print(f"{clean()} processes of killed runs ended")
