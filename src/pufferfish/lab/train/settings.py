"""`RunSettings`: settings of a training run beside its task."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ..method_name import TrainingMethod
from ..network import LinkShape
from ..tasks import Recipe, Task
from .narrow import NarrowWidth, check_takes_width


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
