"""`RunSettings`: settings of a training run beside its task; and the width of a model that the method `narrow` trains."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ...planning import plan
from ..method_name import TrainingMethod
from ..network import LinkShape
from ..tasks import Recipe, Task


@dataclass(frozen=True)
class RunSettings:
    """Settings of a training run beside its task.

    Args:
        method: how the model changes and how gradients are compressed.
        recipe: epochs, batch size, optimizer and learning rates.
        folder: for checkpoints and the log; an unfinished run there is resumed.
        data: folder with the data; None: the task's default.
        precision: of forward and backward passes: "fp32" or "bf16".
        accumulate: backward passes per update.
        compile: train with torch.compile.
        save_every: updates between checkpoints; None: at the end of epochs, at most every few seconds.
        simulate: number of workers to simulate exactly in this process; their times are predicted.
        network: link for the predictions.
        save_model: write the trained model to the subfolder `model`, by `pufferfish.save`.
        tensorboard: write the metrics to TensorBoard files, too.
        quiet: write no messages.
        brief: messages about the run replace one another on one line, after this text; "": they stay.
        hosts: machines that the workers run on.
        timeout: seconds that workers wait for one another; None: torch's default.
        narrow: width of a narrow model, which `train` finds.

    >>> from pufferfish.lab.method_name import training_method
    >>> from pufferfish.lab.tasks import find_task
    >>> RunSettings(training_method("dense"), find_task("digits").recipe("short"), Path("runs/try")).precision
    'fp32'
    """

    method: TrainingMethod
    recipe: Recipe
    folder: Path
    data: Path | None = None
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    accumulate: int = 1
    compile: bool = False
    save_every: int | None = None
    simulate: int | None = None
    network: str = "10gbit"
    save_model: bool = False
    tensorboard: bool = False
    quiet: bool = False
    brief: str = ""
    hosts: int = 1
    timeout: float | None = None
    narrow: NarrowWidth | None = None

    def __post_init__(self) -> None:
        counts = {"accumulate": self.accumulate, "save-every": self.save_every, "workers": self.simulate}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")
        if self.timeout is not None and not 0 < self.timeout < 1e9:
            raise ValueError(f"--timeout {self.timeout:g}: must be a number of seconds above 0")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU; use --device cpu")
        if self.simulate:
            LinkShape.parse(self.network)
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ImportError(
                "--tensorboard: the package tensorboard is not installed: pip install tensorboard"
            )

    def check(self, task: Task, processes: int) -> None:
        """Raise ValueError if the settings do not fit the task or the number of processes."""
        if self.accumulate > 1 and not task.static_shapes:
            raise ValueError(
                f"--accumulate {self.accumulate}: batches of {task.name} differ in their number of tokens, so the mean over "
                "passes is not the mean over the batch; remove --accumulate"
            )
        if self.recipe.optimizer == "sam" and self.simulate:
            raise ValueError(
                "optimizer=sam: each worker perturbs its own weights, which --simulate does not support"
            )
        if self.recipe.optimizer == "lamb" and self.method.low_rank and self.method.low_rank.frobenius:
            raise ValueError(
                "optimizer=lamb: it scales weight decay by its trust ratio, so frobenius cannot undo the factors' own; remove "
                "frobenius"
            )
        if self.method.narrow is not None:
            check_takes_width(task)
        if self.simulate and processes > 1:
            raise ValueError(
                f"--simulate: all workers run in one process, but {processes} processes were started; start one"
            )
        workers = self.simulate or processes
        if self.recipe.batch % (workers * self.accumulate):
            passes = f" and {self.accumulate} passes" if self.accumulate > 1 else ""
            raise ValueError(
                f"a batch of {self.recipe.batch} cannot be split equally over {workers} workers{passes}; "
                "change --batch"
            )

    @property
    def autocast(self) -> torch.autocast:
        """Context for forward passes and evaluation."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")


#: Widths that are tried.
TRIES = 12


@dataclass(frozen=True)
class NarrowWidth:
    """The width of a narrower model, a factor for the task's `build`, and a note about how it was found."""

    width: float
    note: str


def find_width(task: Task, settings: RunSettings) -> NarrowWidth:
    """Find the width of the run's method; the same on all workers."""
    method = settings.method.narrow
    assert method is not None
    if _parameters(task, 0.5) == _parameters(task, 1.0):
        raise ValueError(
            f"method narrow: {task.name} builds the same model for width=0.5 as for width=1.0; multiply the sizes of its "
            "hidden layers by width"
        )
    rank = settings.recipe.rank if method.rank is None else method.rank
    target = method.parameters or plan(_on_meta(task, None), rank, keep=task.keep).after.parameters
    width, ratio = closest_width(lambda width: _parameters(task, width) / target)
    wanted = f"{target:,}" if method.parameters else f"the low-rank model's {target:,} (rank {rank:g})"
    size = f"{width:.3g} of the width, {_parameters(task, width):,} parameters"
    return NarrowWidth(width, f"{settings.method.name}: {size}, {ratio:.3f} of {wanted}.")


def closest_width(ratio: Callable[[float], float], tries: int = TRIES) -> tuple[float, float]:
    """Return the width whose ratio is the closest to 1, and that ratio, by bisection.

    Args:
        ratio: of a width above 0 and at most 1; it rises with the width, but may have steps.

    >>> closest_width(lambda width: 4 * width**2)
    (0.5, 1.0)
    """
    low, high = 0.0, 1.0
    best = tried = (1.0, ratio(1.0))
    for _ in range(tries if tried[1] > 1 else 0):
        low, high = (tried[0], high) if tried[1] < 1 else (low, tried[0])
        tried = (low + high) / 2, ratio((low + high) / 2)
        best = min(best, tried, key=lambda pair: abs(math.log(pair[1])))
    return best


def _parameters(task: Task, width: float) -> int:
    return sum(p.numel() for p in _on_meta(task, NarrowWidth(width, "")).parameters())


def _on_meta(task: Task, narrow: NarrowWidth | None) -> nn.Module:
    """A model without values; a user's code may need them."""
    try:
        with torch.device("meta"):
            return build_model(task, narrow)
    except (RuntimeError, NotImplementedError, ValueError):
        return build_model(task, narrow)


def check_takes_width(task: Task) -> None:
    """Raise ValueError if the task's model cannot be built narrower.

    >>> from pufferfish.lab.tasks import find_task
    >>> check_takes_width(find_task("digits"))
    """
    parameters = inspect.signature(task.builder).parameters
    if "width" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"method narrow: the model of {task.name} takes no width; add the argument `width=1.0` to the function "
            "that builds it, and multiply the sizes of its hidden layers by it"
        )


def build_model(task: Task, narrow: NarrowWidth | None) -> nn.Module:
    """Build the task's model, narrower if a width is given.

    >>> from pufferfish.lab.tasks import find_task
    >>> build_model(find_task("digits:mlp"), NarrowWidth(0.5, "half"))[1]
    Linear(in_features=64, out_features=128, bias=True)
    """
    return task.build() if narrow is None else task.build(width=narrow.width)  # type: ignore[call-arg]
