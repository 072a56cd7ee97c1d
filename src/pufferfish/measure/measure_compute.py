"""`measure_compute`: times the computation of a training step, without any communication."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..optim.carry import Optimizers
from .breakdown import Breakdown
from .clock import pause, trimmed_mean
from .cost_model import Work
from .gradient_timeline import GradientTimeline

#: Parts of a step that need no other worker.
COMPUTE_PARTS = ("data", "forward", "backward", "optimizer")


def measure_compute(
    model: nn.Module, step: Callable[[], object], optimizer: Optimizers = None, *, steps: int = 5
) -> Work:
    """Time `steps` calls of `step` after three untimed ones; each part is a trimmed mean in seconds.

    Args:
        model: the model that `step` calls, wrapped or not.
        step: runs forward, backward and an update. It must not communicate: run it under `no_sync`.
        optimizer: see `Breakdown`.

    >>> import torch
    >>> model = nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step() -> None:
    ...     model(torch.ones(8, 64)).sum().backward()
    ...     optimizer.step()
    >>> work = measure_compute(model, step, optimizer)
    >>> work.backward > 0, work.messages
    (True, ())
    """
    with GradientTimeline(model) as timeline:
        for _ in range(3):  # the timeline records the second
            step()
    timings: dict[str, list[float]] = {name: [] for name in (*COMPUTE_PARTS, "exchange")}
    for _ in range(steps):
        pause()
        with Breakdown(model, optimizer) as times:
            step()
        for name, seconds in timings.items():
            seconds.append(times.parts[name])
    parts: dict[str, Any] = {name: trimmed_mean(seconds) for name, seconds in timings.items()}
    parts["backward"] += parts.pop("exchange")  # under no_sync this is only the end of backward
    return Work(**parts, gradient_curve=timeline.curve())
