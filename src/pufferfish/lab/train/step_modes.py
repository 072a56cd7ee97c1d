"""`step_modes`: the modes in which a run may compute its updates."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..tasks import Task
from .run_settings import RunSettings

#: All modes, the fastest first.
_FASTEST_FIRST = ("compile+graph", "graph", "compile", "eager")


@dataclass(frozen=True)
class StepModes:
    """The modes in which a run may compute its updates.

    Args:
        candidates: modes to try, the fastest first; a single one is used without a trial.
        refused: why "compile" or "graph" is no candidate.
        capturable: whether a CUDA graph may capture updates of this run in some mode. The optimizer is built for it, and is
            the same in all modes.
    """

    candidates: tuple[str, ...]
    refused: Mapping[str, str]
    capturable: bool

    @property
    def compiles(self) -> bool:
        """Whether a model may be compiled in some candidate."""
        return any("compile" in mode for mode in self.candidates)


def step_modes(task: Task, settings: RunSettings, processes: int) -> StepModes:
    """Return the mode of the settings, or the candidates of "auto".

    >>> from pathlib import Path
    >>> from pufferfish.lab.tasks import find_task
    >>> from pufferfish.lab.train.training_method import training_method
    >>> digits = find_task("digits")
    >>> step_modes(digits, RunSettings(training_method("dense"), digits.recipe("short"), Path()), 1).candidates
    ('eager',)
    """
    no_graph = settings.graph_refusal(task, processes)
    if settings.mode != "auto":
        return StepModes((settings.mode,), {}, no_graph is None)
    if settings.device != "cuda":
        return StepModes(("eager",), {}, False)
    refused = {} if no_graph is None else {"graph": no_graph}
    if processes > 1:
        # A worker that cannot compile would leave the others waiting in a collective.
        refused["compile"] = "with several processes only by --mode compile"
    elif settings.simulate:
        refused["compile"] = "with simulated workers only by --mode compile"
    candidates = tuple(m for m in _FASTEST_FIRST if not any(part in refused for part in m.split("+")))
    return StepModes(candidates, refused, no_graph is None)
