"""`LocalStepRunner`: the updates of a worker that averages its model with others once in several updates."""

from torch import Tensor

from ...local.local_steps import LocalSteps
from .run_components import RunComponents
from .step_runner import StepRunner


class LocalStepRunner(StepRunner):
    """Runs the updates of one worker, followed by its local steps, which are `components.hook`. Create it on all workers."""

    def __init__(self, components: RunComponents) -> None:
        assert isinstance(components.hook, LocalSteps)
        self.local = components.hook
        super().__init__(components)

    @property
    def wire_bytes(self) -> float:
        return self.local.applied_bytes

    @property
    def waited(self) -> float:
        return self.local.waited

    def model_changed(self) -> None:
        super().model_changed()
        self.local.start(self.components.module)

    def update(self, lr: float) -> Tensor:
        loss = super().update(lr)
        self.local.step(self.components.module)
        return loss

    def sync(self) -> None:
        self.local.sync(self.components.module)
