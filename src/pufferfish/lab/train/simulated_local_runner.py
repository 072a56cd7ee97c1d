"""`SimulatedLocalRunner`: the updates of several workers with local steps, computed by one process on one device."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...checkpoint.files import load_model_state, model_state
from ...lowrank.by_name import load_optimizer, names_by_id, optimizer_state
from ...lowrank.optimizers import as_list
from ..rivals.model_change import ModelChange
from .run_components import RunComponents
from .simulated_ddp import WorkerGenerators
from .simulated_local_steps import SimulatedLocalSteps
from .simulated_step_runner import worker_seed
from .step_runner import StepRunner


class SimulatedLocalRunner(StepRunner):
    """Runs the updates of `components.world_size` workers, each with its own model, optimizer, batches and dropout.

    Every worker is a `StepRunner`, as it is in a process of its own. `state_dict` has the models and optimizers of all
    workers but the first, whose are `components.module` and `components.optimizer`.
    """

    def __init__(self, components: RunComponents) -> None:
        c, seed, size = components, components.settings.seed, components.world_size
        assert c.settings.method.local is not None
        self.components = components
        self.local = SimulatedLocalSteps(c.settings.method.local, size)
        self._generators = WorkerGenerators([worker_seed(seed, worker) for worker in range(size)], c.device)
        self._loaded: Mapping[str, Any] | None = None
        self.model_changed()

    def model_changed(self) -> None:
        """Compile the models anew, and start the local steps with the first worker's model."""
        c = self.components
        pairs = [(c.module, c.optimizer), *((r.module, r.optimizer) for r in c.replicas)]
        self._workers = [
            StepRunner(
                replace(c, model=module, module=module, optimizer=optimizer, worker=worker, replicas=[])
            )
            for worker, (module, optimizer) in enumerate(pairs)
        ]
        self.local.start(self._models)

    @property
    def wire_bytes(self) -> float:
        return self.local.applied_bytes

    def begin_epoch(self, epoch: int, start: int) -> None:
        for worker in self._workers:
            worker.begin_epoch(epoch, start)

    def update(self, lr: float) -> Tensor:
        """Train all workers on their next batches; return the loss of the first one."""
        losses = []
        for number, worker in enumerate(self._workers):
            with self._generators.use(number):
                losses.append(worker.update(lr))
        self.local.step(self._models)
        return losses[0]

    def sync(self) -> None:
        self.local.sync(self._models)

    def state_dict(self) -> dict[str, Any]:
        """Return the models and optimizers of the other workers, and all carried tensors and random generators."""
        return {
            "workers": [worker.state_dict() for worker in self._workers],
            "streams": self._generators.state_dict(),
            "replicas": [
                {
                    "model": model_state(r.module),
                    "optimizers": [optimizer_state(o, names_by_id(r.module)) for o in as_list(r.optimizer)],
                }
                for r in self.components.replicas
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Models follow in `resumed`, when all of them have the saved structure."""
        assert len(state["workers"]) == len(self._workers)  # check_same_run refuses another number
        self._loaded = state
        self._generators.load_state_dict(state["streams"])

    def resumed(self, change: ModelChange) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        for replica, saved in zip(self.components.replicas, state["replicas"], strict=True):
            change.restore_replica(replica.module, replica.optimizer)
            load_model_state(replica.module, saved["model"])
            names = names_by_id(replica.module)
            for optimizer, one in zip(as_list(replica.optimizer), saved["optimizers"], strict=True):
                load_optimizer(optimizer, names, one)
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.load_state_dict(saved)

    @property
    def _models(self) -> list[nn.Module]:
        return [worker.components.module for worker in self._workers]
