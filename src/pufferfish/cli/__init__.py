"""The `pufferfish` command: arguments in, library calls, text out. No logic of its own; a file for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import advise, bench, convert, demo, fetch, methods, network, plan, report, train
from .amx import avoid_broken_amx

COMMANDS = (demo, advise, plan, convert, methods, train, bench, report, fetch, network)
#: Commands that compute nothing, so the CPU need not be tried.
_IDLE = ("report", "fetch", "network")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for bad input, with one line that says what to do."""
    arguments = _parser().parse_args(argv)
    if arguments.command not in _IDLE and (line := avoid_broken_amx()):
        print(f"pufferfish: {line}", file=sys.stderr)
    try:
        run: Callable[[argparse.Namespace], int | None] = arguments.run
        return run(arguments) or 0
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pufferfish {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pufferfish", description="Train networks that are already small.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def _version() -> str:
    from .. import __version__

    return f"pufferfish {__version__}"
