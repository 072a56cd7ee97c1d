"""`due_pieces`: what can be done next in a bench, each by a process of its own: runs, and measurements without other load."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...measure import read_run
from ...planning.json_file import read_json
from ..rivals.pruning_by_name import is_pruning_method
from ..tasks import Recipe
from ..train.find_width import saved_width
from .bench_method import bench_method
from .bench_runs import BenchRun, bench_runs, is_finished, slug
from .bench_settings import REFERENCES, BenchSettings
from .choose_rate import choose_rate, untried_runs
from .models_to_time import finished_run
from .summary import LENGTH

WIDTHS = "widths"


@dataclass(frozen=True)
class Piece:
    """A run, or a measurement.

    Args:
        name: folder of the run or file of the measurement, relative to the bench folder.
        alone: whether it measures times, so that nothing else may use the device.

    >>> Piece("runs/dense/seed-0", "dense").kind, Piece("equal-time/auto/length.json", "auto", alone=True).kind
    ('runs', 'length.json')
    """

    name: str
    method: str
    alone: bool = False

    @property
    def kind(self) -> str:
        """Key that pieces of similar length share."""
        first, *_, last = self.name.split("/")
        return last if last == LENGTH else first


def due_pieces(settings: BenchSettings, root: Path, failed: Collection[str] = ()) -> list[Piece]:
    """All pieces that are neither done nor failed nor waiting for others, in the order in which they should be started.

    A width that is measured comes before the method's runs; all tuning runs of a method come before its other runs. After the
    runs of the first seed, the number of updates at equal time is measured, which also gives the times of steps.
    """
    task, recipe = settings.resolve()
    of_bench = (settings, root, task, recipe, failed)
    widths = [
        m for m in settings.methods if _measures_width(m) and not width_of_method(m, settings, recipe, root)
    ]
    pieces = [Piece(width_file(method), method, alone=True) for method in widths]
    trained = [method for method in settings.methods if method not in widths]
    tuning = [run for method in trained for run in untried_runs(method, *of_bench)]
    has_rate = {method: choose_rate(method, *of_bench) is not None for method in trained}
    first: list[BenchRun] = []
    others: list[BenchRun] = []
    for run in bench_runs(settings, recipe):
        ready = run.lr is None and has_rate.get(run.method) and not is_finished(root / run.name)
        if ready and (run.equal == "steps" or length_file(run.method, settings, root).exists()):
            (first if run.seed == 0 and run.equal == "steps" else others).append(run)
    lengths = [
        method
        for method in settings.methods
        if not length_file(method, settings, root).exists() and _is_timed(method, settings, root)
    ]
    pieces += [Piece(run.name, run.method) for run in (*tuning, *first)]
    pieces += [Piece(str(length_file(m, settings, root).relative_to(root)), m, alone=True) for m in lengths]
    pieces += [Piece(run.name, run.method) for run in others]
    return [piece for piece in pieces if piece.name not in failed]


def missing_pieces(settings: BenchSettings, root: Path) -> list[Piece]:
    """All pieces that are not done, also those that wait for others; not tuning runs that may follow from the scores of others."""
    task, recipe = settings.resolve()
    runs = [run for method in settings.methods for run in untried_runs(method, settings, root, task, recipe)]
    runs += [
        run for run in bench_runs(settings, recipe) if run.lr is None and not is_finished(root / run.name)
    ]
    widths = [
        m for m in settings.methods if _measures_width(m) and not width_of_method(m, settings, recipe, root)
    ]
    pruned = [method for method in settings.methods if is_pruning_method(bench_method(method).method.model)]
    timed = [method for method in settings.methods if method != REFERENCES[0] and method not in pruned]
    lengths = [method for method in timed if not length_file(method, settings, root).exists()]
    measured = [(m, width_file(m)) for m in widths]
    measured += [(m, str(length_file(m, settings, root).relative_to(root))) for m in lengths]
    return [
        *(Piece(run.name, run.method) for run in runs),
        *(Piece(name, method, alone=True) for method, name in measured),
    ]


def done_pieces(settings: BenchSettings, root: Path) -> list[str]:
    """The names of all pieces that are done."""
    _, recipe = settings.resolve()
    files = [width_file(method) for method in settings.methods]
    files += [str(length_file(method, settings, root).relative_to(root)) for method in settings.methods]
    names = [*files, *(run.name for run in bench_runs(settings, recipe))]
    return [name for name in names if is_done(root, name)]


def is_done(root: Path, name: str) -> bool:
    """Whether a piece is done."""
    return (root / name).is_file() if name.endswith(".json") else is_finished(root / name)


def width_file(method: str) -> str:
    """File of a measured width, relative to the bench folder."""
    return f"{WIDTHS}/{slug(method)}.json"


def length_file(method: str, settings: BenchSettings, root: Path) -> Path:
    """File with the number of updates of a method at equal time or bytes, and with the times of its steps."""
    kind = "time" if settings.equal == "steps" else settings.equal
    return (root / BenchRun(method, 0, equal=kind).name).with_name(LENGTH)


def width_of_method(
    method: str, settings: BenchSettings, recipe: Recipe, root: Path
) -> dict[str, Any] | None:
    """The width of a narrow model that was measured, or that a run of the method has found: all its runs train the same model."""
    if (path := root / width_file(method)).is_file():
        return dict(read_json(path)["width"])
    name = bench_method(method).method.name
    runs = (run for run in bench_runs(settings, recipe) if run.method == method)
    return next((found for run in runs if (found := saved_width(root / run.name, name))), None)


def _measures_width(method: str) -> bool:
    narrow = bench_method(method).method.narrow
    return narrow is not None and narrow.time


def _is_timed(method: str, settings: BenchSettings, root: Path) -> bool:
    """Whether steps of a method are timed beside dense ones: it has a run, which has no times of its own, or is repeated.

    A pruned model is in the checkpoints of its run, so it is timed on the machine of the run, if at all.
    """
    folder = finished_run(method, settings, root)
    if folder is None or method == REFERENCES[0]:
        return False
    return settings.equal != "steps" or bool(read_run(folder).results.get("shared"))
