"""`GradientTimeline`: records when each gradient becomes available during a backward pass."""

from __future__ import annotations

from torch import Tensor, nn

from ..compression.meter import Timestamp, elapsed, timestamp

_POINTS = 32  # of the curve; more do not change predictions


class GradientTimeline:
    """Records the second backward pass that runs in its `with` block; the first is slower than the others."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # One dict per backward pass: parameter id → (bytes, time its gradient was ready).
        self._passes: list[dict[int, tuple[int, Timestamp]]] = [{}]

    def __enter__(self) -> GradientTimeline:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._record) for p in trainable]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, p: Tensor) -> None:
        if len(self._passes) > 2:
            return  # hooks cannot be removed while they run
        if id(p) in self._passes[-1]:
            self._passes.append({})
        self._passes[-1][id(p)] = p.nbytes, timestamp(p.device)

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Points (fraction of the gradient bytes, fraction of backward), for `Work.gradient_curve`. Waits for the device."""
        ready = list(self._passes[min(1, len(self._passes) - 1)].values())
        total = sum(nbytes for nbytes, _ in ready)
        if len(ready) < 2 or not total:
            return (0.0, 0.0), (1.0, 1.0)
        seconds = [elapsed(ready[0][1], stamp) for _, stamp in ready]
        points, done, next_point = [(0.0, 0.0)], 0, 1 / _POINTS
        for (nbytes, _), at in zip(ready, seconds, strict=True):
            done += nbytes
            if done / total >= next_point:
                points.append((done / total, at / seconds[-1] if seconds[-1] > 0 else 1.0))
                next_point = done / total + 1 / _POINTS
        return (*points[: -1 if points[-1][0] == 1 else None], (1.0, 1.0))
