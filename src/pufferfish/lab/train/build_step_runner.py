"""`build_step_runner`: the runner that computes the updates of a run."""

from .local_step_runner import LocalStepRunner
from .run_components import RunComponents
from .simulated_local_runner import SimulatedLocalRunner
from .simulated_step_runner import SimulatedStepRunner
from .step_runner import StepRunner


def build_step_runner(components: RunComponents) -> StepRunner:
    """Build the runner for real or simulated workers, with DDP or local steps. Call it on all workers."""
    simulated = components.settings.simulate is not None
    if components.settings.method.local is not None:
        return (SimulatedLocalRunner if simulated else LocalStepRunner)(components)
    return (SimulatedStepRunner if simulated else StepRunner)(components)
