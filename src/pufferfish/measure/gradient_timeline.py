"""`GradientTimeline`: records when each gradient becomes available during a backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .breakdown import output_tensors
from .clock import Timestamp, elapsed, timestamp

_POINTS = 32  # of the curve; more do not change predictions


class GradientTimeline:
    """Records the second backward pass that runs in its `with` block; the first is slower than the others.

    A pass starts when the gradient of an output of `model` is computed, as in `Breakdown`.

    Args:
        model: the model that the loop calls, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._handles: list[Any] = []
        self._started = False  # whether the backward pass of the latest forward pass has started
        # For each backward pass, its start and parameter id → (bytes, time its gradient was ready).
        self._passes: list[tuple[Timestamp, dict[int, tuple[int, Timestamp]]]] = []

    def __enter__(self) -> GradientTimeline:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._record) for p in trainable]
        self._handles.append(self.model.register_forward_hook(self._after_forward))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._started = False
        if len(self._passes) > 2:
            return  # hooks cannot be removed while they run
        for x in output_tensors(output):
            if x.requires_grad:
                x.register_hook(self._on_backward_start)

    def _on_backward_start(self, gradient: Tensor) -> None:
        if self._handles and not self._started:
            self._started = True
            self._passes.append((timestamp(self.device), {}))

    def _record(self, p: Tensor) -> None:
        if self._started and len(self._passes) <= 2:
            self._passes[-1][1].setdefault(id(p), (p.nbytes, timestamp(p.device)))

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Points (fraction of the gradient bytes, fraction of backward), for `Work.gradient_curve`. Waits for the device."""
        start, gradients = self._passes[:2][-1] if self._passes else (0.0, {})
        ready = list(gradients.values())
        total = sum(nbytes for nbytes, _ in ready)
        if len(ready) < 2 or not total:
            return (0.0, 0.0), (1.0, 1.0)
        seconds = [elapsed(start, stamp) for _, stamp in ready]
        points, done, next_point = [(0.0, 0.0)], 0, 1 / _POINTS
        for (nbytes, _), at in zip(ready, seconds, strict=True):
            done += nbytes
            if done / total >= next_point:
                points.append((done / total, at / seconds[-1] if seconds[-1] > 0 else 1.0))
                next_point = done / total + 1 / _POINTS
        return (*points[: -1 if points[-1][0] == 1 else None], (1.0, 1.0))
