"""Settings from arguments, and checks of `--out` before the work starts."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


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
