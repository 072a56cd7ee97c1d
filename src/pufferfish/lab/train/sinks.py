"""Further outputs for the metrics of a run, beside metrics.csv: JSON lines and TensorBoard."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ...planning.json_file import errors_name, write_text

JSONL = "metrics.jsonl"


class Sink(Protocol):
    """An output for logged metrics."""

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        """Write the values after `step` updates."""

    def close(self) -> None:
        """Close the output."""


class JsonLines:
    """Writes metrics.jsonl, one object per row.

    Args:
        resume: updates that a resumed run has done; later rows are removed. None: a new run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = JsonLines(Path(folder), None)
    ...     lines.log(20, 0.5, {"loss": 2.25})
    ...     lines.close()
    ...     (Path(folder) / JSONL).read_text()
    '{"step": 20, "epoch": 0.5, "loss": 2.25}\\n'
    """

    def __init__(self, folder: Path, resume: int | None) -> None:
        path = self._path = folder / JSONL
        earlier: list[str] = []
        if resume is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(True)
            complete = [line for line in lines if line.endswith("\n")]
            earlier = [line for n, line in enumerate(complete, 1) if _step(line, f"{path}:{n}") <= resume]
        write_text(path, "".join(earlier))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        with errors_name(self._path):
            self._file.write(json.dumps({"step": step, "epoch": epoch, **finite}) + "\n")
            self._file.flush()

    def close(self) -> None:
        with errors_name(self._path):
            self._file.close()


def _step(line: str, source: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{source}: not a row of {JSONL}; delete the file, or restore it") from None


class TensorBoard:
    """Writes event files to tensorboard/ in the run's folder."""

    def __init__(self, folder: Path, resume: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume is None else resume + 1
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        for name, x in values.items():
            self._writer.add_scalar(name, x, step)

    def close(self) -> None:
        self._writer.close()


SINKS: dict[str, Any] = {"jsonl": JsonLines, "tensorboard": TensorBoard}


def check_sinks(names: Sequence[str]) -> None:
    """Raise if a sink does not exist or its package is not installed.

    >>> check_sinks(["jsonl"])
    """
    for name in names:
        if name not in SINKS:
            raise ValueError(f"unknown sink {name!r}; must be one of {', '.join(SINKS)}")
    if "tensorboard" in names and find_spec("tensorboard") is None:
        raise ImportError("--tensorboard: the package tensorboard is not installed: pip install tensorboard")
