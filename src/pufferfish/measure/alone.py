"""`alone`: the work of a step that waits for nobody, measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from torch import nn

from ..names import unwrap
from ..optim import Optimizers
from .breakdown import Breakdown
from .model import Work
from .ready import Ready

_COMPUTING = ("data", "forward", "backward", "optimizer")


def alone(
    model: nn.Module, step: Callable[[], object], optimizer: Optimizers = None, *, steps: int = 5
) -> Work:
    """Medians over `steps` calls of `step`, after two. It must not exchange anything: call it under `no_sync`.

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
    laps: dict[str, list[float]] = {name: [] for name in (*_COMPUTING, "exchange")}
    with Breakdown(model, optimizer) as times:
        for _ in range(steps):
            step()
            parts = times.read()
            for name, seen in laps.items():
                seen.append(parts[name])
    middle: dict[str, Any] = {name: statistics.median(seen) for name, seen in laps.items()}
    middle["backward"] += middle.pop("exchange")  # nothing but the end of the pass
    return Work(**middle, ready=ready.curve())
