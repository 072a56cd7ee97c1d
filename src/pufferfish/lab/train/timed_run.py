"""`TimedRun`: updates of a run that are only timed, as they run in training: eager, compiled or in a CUDA graph."""

import time

import torch
import torch.distributed as dist

from .build_step_runner import build_step_runner
from .run_components import RunComponents

#: Updates before the timing: DDP rebuilds its buckets, models are compiled or captured in a CUDA graph.
WARM_UP = 5


class TimedRun:
    """The updates of a model with the run's data, optimizer, compression and mode. Create it on all workers.

    Args:
        steps_left: updates of the training whose mode is chosen here, if the settings leave it open.
    """

    def __init__(self, components: RunComponents, steps_left: int = 0) -> None:
        self.components = components
        self._runner = build_step_runner(components, steps_left=lambda: steps_left)
        self._steps_per_epoch = components.task.steps(components.data, components.settings.recipe.batch)
        self._done = 0
        components.model.train()

    @property
    def mode(self) -> str:
        """Mode of the updates; eager before the warm-up, if it is chosen here."""
        return self._runner.mode or "eager"

    def seconds(self, steps: int) -> float:
        """Mean seconds of an update. All workers start and end at the same time."""
        self._runner.wait()
        self._barrier()
        start = time.perf_counter()
        for _ in range(steps):
            epoch, step = divmod(self._done, self._steps_per_epoch)
            if step == 0:
                self._runner.begin_epoch(epoch, 0)
            self._runner.update(0.0)  # weights stay the same, so that the loss stays finite
            self._done += 1
        self._barrier()
        seconds = (time.perf_counter() - start) / steps
        self._runner.wait()  # messages on their way must not meet those of other runs
        return seconds

    def _barrier(self) -> None:
        if self.components.device.type == "cuda":
            torch.cuda.synchronize(self.components.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
