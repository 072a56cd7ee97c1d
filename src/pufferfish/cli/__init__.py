"""The `pufferfish` command: parses arguments, calls the library, prints results; one file per command.

A command's module has a docstring, which is its description; `HELP`, one line for the list of commands;
`add_arguments(parser)`; and `run(arguments)`, which returns the exit code, or None for 0. At its top it imports
nothing that imports torch: `--help` takes a tenth of a second, torch seconds.
"""

import argparse
import difflib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import advise, bench, convert, demo, env, fetch, merge, methods, plan, report, train
from .amx import avoid_broken_amx
from .terminal import progress_bars, say_starting

COMMANDS = (demo, advise, plan, convert, merge, methods, train, bench, report, fetch, env)
#: Commands that run no model, so the AMX check is not needed.
_NO_COMPUTE = ("report", "fetch")
#: Commands that run for long, with nothing to see while torch is imported.
_LONG = ("advise", "train", "bench")

EPILOG = """\
`pufferfish COMMAND --help` describes a command.

tab completion, a line for the startup file of your shell:
  bash, zsh   eval "$(register-python-argcomplete pufferfish)"
  fish        register-python-argcomplete --shell fish pufferfish | source
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for invalid input, 130 for ctrl-C, with a one-line message on stderr."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the shell when the user presses tab
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        print(_unknown(arguments.command, unknown[0]), file=sys.stderr)
        return 2
    if arguments.command is None:
        parser.print_help()
        return 0
    show_warning, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        if arguments.command in _LONG:
            say_starting()
        if arguments.command not in _NO_COMPUTE and (warning := avoid_broken_amx()):
            print(f"pufferfish: {warning}", file=sys.stderr)
        run: Callable[[argparse.Namespace], int | None] = arguments.run
        with progress_bars():
            code = run(arguments) or 0
        if argv is None and code == 130:  # stopped, all is saved: a second ctrl-C must not print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        line = "\n" * sys.stderr.isatty()  # the terminal shows ^C
        print(f"{line}pufferfish {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"  # without "[Errno 2]"
        print(f"pufferfish {arguments.command}: {text}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = show_warning


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning without the file and the line of code that it comes from."""
    return f"pufferfish: warning: {message}\n"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which fills half a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    what = "Low-rank training and gradient compression for PyTorch."
    parser = _Parser(
        prog="pufferfish",
        description=what,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pufferfish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in COMMANDS:
        name, text = module.__name__.rpartition(".")[2], module.__doc__ or ""
        # Descriptions of several lines hold examples, which must not be wrapped.
        formatter = argparse.RawDescriptionHelpFormatter if "\n" in text else argparse.HelpFormatter
        command = commands.add_parser(name, help=module.HELP, description=text, formatter_class=formatter)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _unknown(command: str | None, word: str) -> str:
    """The error for an argument that no option has. argparse would show the usage of `pufferfish`, not of the command."""
    options = argparse.ArgumentParser()
    for module in COMMANDS:
        if module.__name__.rpartition(".")[2] == command:
            module.add_arguments(options)
    option = word.partition("=")[0]
    close = difflib.get_close_matches(option, options._option_string_actions, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    name = f"pufferfish {command}" if command else "pufferfish"
    return f"{name}: unknown argument {word}{hint}; see `{name} --help`"
