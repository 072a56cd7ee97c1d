"""Manage emulated networks."""

import argparse

HELP = "clean up after killed runs on emulated networks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["clean"], help="kill processes that killed runs left behind")


def run(arguments: argparse.Namespace) -> None:
    from ..lab.network import kill_orphans

    print(f"{kill_orphans()} orphaned processes killed")
