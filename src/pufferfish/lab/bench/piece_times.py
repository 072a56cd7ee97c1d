"""`PieceTimes`: how long the pieces of a bench take, from those that are finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...planning.json_file import read_json
from .bench_pieces import WIDTHS, Piece
from .bench_settings import BenchSettings
from .summary import LENGTH

#: Kinds of pieces whose time is used for kinds of which none is finished.
_SIMILAR = {"runs": "tune", "equal-time": "runs", "equal-bytes": "runs"}
#: Seconds until a process trains, and of measurements, as long as none is finished. A width may take several models to compile.
START = 30.0
MEASUREMENT = {WIDTHS: 120.0, LENGTH: 30.0}


class Measured(NamedTuple):
    """Seconds of a finished piece, from the start of its process, and how many processes shared the device."""

    seconds: float
    beside: int


@dataclass(frozen=True)
class PieceTimes:
    """The times of a bench's finished pieces, and what follows for others.

    Args:
        expected: seconds of a run that is alone on the device, as long as none is finished.
    """

    settings: BenchSettings
    measured: dict[Piece, Measured]
    expected: float | None = None

    @classmethod
    def of(cls, settings: BenchSettings, root: Path, expected: float | None = None) -> PieceTimes:
        """The times of the pieces in a bench folder."""
        return cls(settings, wall_seconds(root), expected)

    def seconds(self, piece: Piece, beside: int) -> float:
        """Seconds until a piece would end that is started now, with so many processes on the device: rather too many."""
        found, scale = self._similar(piece)
        if found:
            return scale * max(each.seconds * _slower(each.beside, beside) for each in found)
        if piece.alone:
            return MEASUREMENT[piece.kind]
        return 0.0 if self.expected is None else START + self._share(piece) * self.expected * beside

    def device_seconds(self, piece: Piece) -> float:
        """Seconds of the device that a piece needs: its time, divided among the processes that shared the device."""
        found, scale = self._similar(piece)
        if found:
            return scale * sum(each.seconds / each.beside for each in found) / len(found)
        return MEASUREMENT[piece.kind] if piece.alone else self._share(piece) * (self.expected or 0.0)

    def _similar(self, piece: Piece) -> tuple[list[Measured], float]:
        """Finished pieces of the same kind, of the same method if there are any, or else of a similar kind; and a factor."""
        kind, scale = piece.kind, 1.0
        while True:
            of_kind = [(p, x) for p, x in self.measured.items() if p.kind == kind]
            own = [x for p, x in of_kind if p.method == piece.method]
            if of_kind or kind not in _SIMILAR or (_SIMILAR[kind] == "tune" and self.expected is not None):
                return own or [x for _, x in of_kind], scale
            kind = _SIMILAR[kind]
            if kind == "tune":
                scale = 1 / self._tuning_share

    @property
    def _tuning_share(self) -> float:
        epochs = self.settings.resolve()[1].epochs
        return (self.settings.tune_epochs or epochs) / epochs

    def _share(self, piece: Piece) -> float:
        return self._tuning_share if piece.kind == "tune" else 1.0


def _slower(before: int, now: int) -> float:
    """Factor on the time of a run if the device has more or fewer processes than before; its start gets no faster.

    >>> _slower(1, 3), _slower(3, 1)
    (3.0, 0.5)
    """
    return now / before if now > before else (1 + now) / (1 + before)


def wall_seconds(root: Path) -> dict[Piece, Measured]:
    """Times of all finished pieces in a bench folder that recorded them."""
    times: dict[Piece, Measured] = {}
    paths = [*root.glob("*/*/*/run.json"), *root.glob("widths/*.json"), *root.glob("equal-*/*/length.json")]
    for path in paths:
        data = read_json(path)
        is_run = path.name == "run.json"
        results = data["results"] if is_run else data
        if results.get("wall_seconds") is not None:
            name = str((path.parent if is_run else path).relative_to(root))
            piece = Piece(name, data["name" if is_run else "method"], alone=not is_run)
            beside = (results.get("shared") or {}).get("beside", 1) if is_run else 1
            times[piece] = Measured(float(results["wall_seconds"]), beside)
    return times
