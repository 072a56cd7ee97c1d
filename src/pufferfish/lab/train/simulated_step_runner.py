"""`SimulatedStepRunner`: the updates of several workers, computed by one process on one device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tasks import Batch
from .run_components import RunComponents
from .simulated_ddp import SimulatedDDP
from .step_runner import StepRunner


class SimulatedStepRunner(StepRunner):
    """Runs the updates of `components.world_size` DDP workers, each with its own batches, dropout and error feedback."""

    def __init__(self, components: RunComponents) -> None:
        settings = components.settings
        self.ddp = SimulatedDDP(
            components.module, settings.method.compression, components.world_size,
            optimizer=components.optimizer,
            seeds=[worker_seed(settings.seed, worker) for worker in range(components.world_size)],
        )  # fmt: skip
        super().__init__(components)
        self.workers = list(range(components.world_size))

    def state_dict(self) -> dict[str, Any]:
        assert self.ddp.generators is not None
        return super().state_dict() | {"streams": self.ddp.generators.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.ddp.generators is not None
        super().load_state_dict(state)
        self.ddp.generators.load_state_dict(state["streams"])

    def _update(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        gradients, loss = self._all_gradients(inputs, carried)
        self.ddp.average(gradients)
        self._optimizer_step()
        return loss

    def _all_gradients(
        self, inputs: Sequence[Tensor], carried: Sequence[Tensor]
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Return the gradients of every worker and the loss of the first one."""
        total = torch.zeros((), device=self.components.device)

        def losses(worker: int, batches: list[Batch]) -> Iterator[Tensor]:
            for batch in batches:
                loss = self._loss(batch) / len(batches)
                if worker == 0:
                    total.add_(loss.detach())
                yield loss

        parts = [(worker, self._worker_batches(worker, inputs, carried)) for worker in self.workers]
        return self.ddp.gradients(losses, parts), total


def worker_seed(seed: int, worker: int) -> int:
    """Seed of a worker's random numbers during training; dropout differs between workers.

    >>> worker_seed(0, 1)
    2000
    """
    return seed + 1000 * (worker + 1)
