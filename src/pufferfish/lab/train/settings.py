"""`Settings`: what a run is told, beside its task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..network import Shape
from ..tasks.task import Recipe, Task
from . import sinks
from .choice import Choice

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Settings:
    """What a run is told, beside its task.

    Args:
        choice: what becomes of the model and its gradients.
        recipe: the numbers.
        folder: for checkpoints and the log; a run that is there goes on.
        data: where the data lies.
        precision: of forward and backward: "fp32", "bf16" or "fp16".
        accumulate: backward passes an update.
        graph: whole updates in a CUDA graph, for tasks whose batches have one shape.
        save_every: updates from one checkpoint to the next; None: at the end of epochs, but not every few seconds.
        simulate: so many workers, played exactly by this process alone; their times are predicted.
        network: the links that they are predicted for.
        sinks: where numbers go as well: "jsonl", "tensorboard".
        hosts: machines that the workers are on.
        timeout: seconds that they wait for one another before they give up; None: as long as torch does.
        name: of the run in its records; "": as the choice was written.
        about: more for run.json's settings.

    >>> from pufferfish.lab.train.choice import choice
    >>> from pufferfish.lab.tasks import find
    >>> Settings(choice("dense"), find("digits").recipe("short"), Path("runs/try")).precision
    'fp32'
    """

    choice: Choice
    recipe: Recipe
    folder: Path
    data: Path | None = None
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    accumulate: int = 1
    compile: bool = False
    graph: bool = False
    save_every: int | None = None
    simulate: int | None = None
    network: str = "10gbit"
    sinks: tuple[str, ...] = ()
    quiet: bool = False
    hosts: int = 1
    timeout: float | None = None
    name: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"accumulate": self.accumulate, "save-every": self.save_every, "workers": self.simulate}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: it counts from 1")
        if self.timeout is not None and not 0 < self.timeout < 1e9:
            raise ValueError(f"--timeout {self.timeout:g}: it is in seconds, above 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision {self.precision}: there are {', '.join(PRECISIONS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU here; take --device cpu")
        if self.graph and self.device != "cuda":
            raise ValueError("--graph: CUDA graphs need a GPU; leave it out, or take --device cuda")
        if self.graph and self.precision == "fp16":
            raise ValueError("--graph: fp16's loss scaler decides on the host; take --precision bf16")
        Shape.parse(self.network)
        sinks.check(self.sinks)

    def check(self, task: Task, processes: int) -> None:
        """Refuse what does not fit the task, or so many processes."""
        if self.recipe.optimizer == "sam" and self.precision == "fp16":
            raise ValueError(
                "--optimizer sam: fp16's loss scaler does not fit two passes; take --precision bf16"
            )
        if self.recipe.optimizer == "sam" and self.simulate:
            raise ValueError("--optimizer sam: each worker climbs by itself, which --simulate does not play")
        if self.graph and not task.static:
            raise ValueError(f"--graph: batches of {task.name} differ in shape; leave it out")
        if self.graph and processes > 1:
            raise ValueError(f"--graph: it is for one process, here are {processes}; try --simulate")
        if self.simulate and processes > 1:
            raise ValueError(f"--simulate plays all workers in one process, here are {processes}; start one")
        parts, size = self.accumulate, self.simulate or processes
        if self.recipe.batch % (size * parts):
            each = f"{size} workers in {parts if parts > 1 else ''} equal parts".replace("  ", " ")
            raise ValueError(f"a batch of {self.recipe.batch} does not go to {each}; change --batch")

    @property
    def called(self) -> str:
        """The run's name."""
        return self.name or self.choice.name

    @property
    def autocast(self) -> torch.autocast:
        """Around forward passes and evaluation."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device, dtype, enabled=self.precision != "fp32")
