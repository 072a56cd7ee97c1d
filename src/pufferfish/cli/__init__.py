"""The `pufferfish` command: parses arguments, calls the library, prints results; one file per command. At the end is what
several commands share: their arguments, settings from arguments, and checks of `--out` before the work starts.

A command's module has a docstring, which is its description; `add_arguments(parser)`; and `run(arguments)`, which returns
the exit code, or None for 0. Only the module of the command that runs is imported, and at its top it imports nothing that
imports torch: `--help` takes a tenth of a second, torch seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

#: Commands and their lines in the list of commands.
COMMANDS = {
    "demo": "compare a few methods on an emulated slow network, in minutes",
    "advise": "recommend how to train on a given network",
    "plan": "show which layers become low-rank and what that saves",
    "convert": "convert a checkpoint to low rank",
    "merge": "convert a low-rank checkpoint back to dense",
    "methods": "say what the names of methods mean, and how much compression saves",
    "train": "train a task on one or several workers, with automatic resume",
    "bench": "compare training methods over seeds and on a network",
    "report": "compare runs on an HTML page or in Markdown",
    "fetch": "download the data of a task",
    "env": "print versions and hardware, for bug reports",
}
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
    words = sys.argv[1:] if argv is None else list(argv)
    completing = "_ARGCOMPLETE" in os.environ  # set by the shell when the user presses tab
    parser = command_parser(COMMANDS if completing else [word for word in words[:1] if word in COMMANDS])
    if completing:
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        print(_unknown(arguments, unknown[0]), file=sys.stderr)
        return 2
    if arguments.command is None:
        parser.print_help()
        return 0
    show_warning, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        code = _run(arguments)
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


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which fills half a screen, and whose help has two pages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rare: list[tuple[argparse.Action, str]] = []

    def add_rare(self, *names: str, help: str, **options: Any) -> None:
        """Add an option that only `--help-all` shows."""
        if not self.rare:
            text = "show further options, too, and exit"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
        self.rare.append((self.add_argument(*names, help=argparse.SUPPRESS, **options), help))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> NoReturn:
        for action, text in parser.rare:
            action.help = text
        parser.print_help()
        raise SystemExit(0)


def command_parser(commands: Sequence[str] | dict[str, str]) -> Parser:
    """The parser with the arguments of some commands; of the others it knows the names."""
    from .. import __version__

    what = "Low-rank training and gradient compression for PyTorch."
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="pufferfish", description=what, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"pufferfish {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, line in COMMANDS.items():
        if name not in commands:
            subparsers.add_parser(name, help=line)
            continue
        module = import_module(f".{name}", __package__)
        text = module.__doc__ or ""
        # Descriptions of several lines hold examples, which must not be wrapped.
        formatter = raw if "\n" in text else argparse.HelpFormatter
        command = subparsers.add_parser(name, help=line, description=text, formatter_class=formatter)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from .amx import avoid_broken_amx
    from .terminal import progress_bars, say_starting

    if arguments.command in _LONG:
        say_starting()
    if arguments.command not in _NO_COMPUTE and (warning := avoid_broken_amx()):
        print(f"pufferfish: {warning}", file=sys.stderr)
    with progress_bars():
        return arguments.run(arguments) or 0


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning without the file and the line of code that it comes from."""
    return f"pufferfish: warning: {message}\n"


def _unknown(arguments: argparse.Namespace, word: str) -> str:
    """The error for an argument that no option has. argparse would show the usage of `pufferfish`, not of the command."""
    options = arguments.parser._option_string_actions if arguments.command else {}
    close = difflib.get_close_matches(word.partition("=")[0], options, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    name = f"pufferfish {arguments.command}" if arguments.command else "pufferfish"
    return f"{name}: unknown argument {word}{hint}; see `{name} --help`"


def add_workers(parser: Parser) -> None:
    """Where a run is computed: `--nodes`, `--per-node`, `--network`, `--simulate`."""
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="number of machines, emulated on this one (default: 1)")
    add("--per-node", type=int, metavar="M", help="workers on each machine (default: 1)")
    link = "emulated link between the machines, 100mbit or '1gbit,delay=5ms' (default: loopback)"
    add("--network", metavar="LINK", help=f"{link}; with --simulate, for predictions (default: 10gbit)")
    add("--simulate", action="store_true", help="simulate all workers in one process and predict times")


def add_device(parser: Parser) -> None:
    """How it is computed: `--device`, `--precision`, `--compile`."""
    text = "device (default: cuda if available and the machines are not emulated)"
    parser.add_rare("--device", choices=("cpu", "cuda"), help=text)
    text = "data type (default: bf16 on cuda, fp32 on cpu)"
    parser.add_rare("--precision", choices=("fp32", "bf16"), help=text)
    parser.add_rare("--compile", action="store_true", help="train with torch.compile")


def default_device(emulated: bool) -> str:
    """The device of a command without `--device`; emulated machines have no GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() and not emulated else "cpu"


def settings_from(kind: type[T], arguments: argparse.Namespace, **changed: Any) -> T:
    """Build settings from the arguments of the same names, updated by `changed`; None selects the default.

    The default precision is that of the device: bf16 for cuda, fp32 for cpu.
    """
    values = vars(arguments) | changed
    values["precision"] = values["precision"] or ("bf16" if values["device"] == "cuda" else "fp32")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if values.get(name) is not None})


def check_output_folder(out: Path) -> None:
    """Raise ValueError if the folder `out` cannot be created or written to."""
    parent = out
    while not parent.exists():
        parent = parent.parent
    _check_writable(out, parent)


def check_output_file(out: Path | None) -> None:
    """Raise ValueError if the file `out` cannot be created."""
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give the path of a file")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    if not out.exists():
        _check_writable(out, out.parent)


def _check_writable(out: Path, folder: Path) -> None:
    try:
        # Permission bits are not enough, in /proc for example.
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError:
        raise ValueError(f"--out {out}: {folder} is not a writable folder; choose another path") from None
