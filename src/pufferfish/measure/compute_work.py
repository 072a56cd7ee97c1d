"""`alone`: the work of a step that waits for nobody, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..layers.names import unwrap
from ..optim.carry import Optimizers
from .breakdown import Breakdown
from .clock import typical, wait
from .cost_model import Work
from .gradient_times import Ready

#: What a step does by itself.
COMPUTING = ("data", "forward", "backward", "optimizer")


def alone(
    model: nn.Module, step: Callable[[], object], optimizer: Optimizers = None, *, steps: int = 5
) -> Work:
    """What `steps` calls of `step` typically take, after three. It must not exchange anything: call it under `no_sync`.

    Args:
        model: the one that `step` calls, wrapped or not.
        step: forward, backward and an update.

    >>> import torch
    >>> model = nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step() -> None:
    ...     model(torch.ones(8, 64)).sum().backward()
    ...     optimizer.step()
    >>> work = alone(model, step, optimizer)
    >>> work.backward > 0, work.messages
    (True, ())
    """
    with Ready(unwrap(model)) as ready:
        for _ in range(3):  # its first pass, and the one that it looks at
            step()
    laps: dict[str, list[float]] = {name: [] for name in (*COMPUTING, "exchange")}
    for _ in range(steps):
        wait()
        with Breakdown(model, optimizer) as times:
            step()
        for name, seen in laps.items():
            seen.append(times.parts[name])
    parts: dict[str, Any] = {name: typical(seen) for name, seen in laps.items()}
    parts["backward"] += parts.pop("exchange")  # nothing but the end of the pass
    return Work(**parts, ready=ready.curve())
