"""`build_timed_model`: a model of a workload that trains with one method in this job."""

from ...compression.settings import HierarchyLike
from ...planning.plan import Plan
from ..method_name import TrainingMethod
from ..train.random_low_rank import random_low_rank_
from .timed_model import TimedModel
from .workload import Workload


def build_timed_model(
    workload: Workload, method: TrainingMethod, plan: Plan | None = None, hierarchy: HierarchyLike = "flat"
) -> TimedModel:
    """Build a separate model for one method; call it on all workers.

    Args:
        plan: layers and ranks of a low-rank model. Its factors are random, which does not change the time of a step.
    """
    model = workload.build()
    if method.model != "dense" and plan is not None and plan.ranks:
        random_low_rank_(model, plan)
    return TimedModel(
        method,
        model,
        workload.optimizer,
        lambda net: workload.forward(net, workload.batch()),
        clip=workload.clip,
        hierarchy=hierarchy,
    )
