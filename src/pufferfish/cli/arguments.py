"""Arguments that several commands share, settings from arguments, and checks of `--out` before the work starts."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from . import Parser

T = TypeVar("T")


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
