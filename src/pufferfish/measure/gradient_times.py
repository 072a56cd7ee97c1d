"""`Ready`: when in a backward pass the gradients are there that an exchange waits for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .clock import Moment, between, now

#: Points of the curve: more would say the same.
_POINTS = 32


class Ready:
    """Watches one backward pass, the second of those that come while it is entered; the first is not like the others.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> with Ready(model) as ready:
    ...     for _ in range(3):
    ...         model(torch.ones(1, 4)).sum().backward()
    >>> ready.curve()[0], ready.curve()[-1]
    ((0.0, 0.0), (1.0, 1.0))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handles: list[Any] = []
        self._passes: list[dict[int, tuple[int, Moment]]] = [{}]  # by parameter: bytes, when

    def __enter__(self) -> Ready:
        self._handles = [
            p.register_post_accumulate_grad_hook(self._there)
            for p in self.model.parameters()
            if p.requires_grad
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _there(self, p: Tensor) -> None:
        if len(self._passes) > 2:
            return  # hooks cannot be taken away while they run
        if id(p) in self._passes[-1]:
            self._passes.append({})
        self._passes[-1][id(p)] = p.nbytes, now(p.device)

    def curve(self) -> tuple[tuple[float, float], ...]:
        """(share of the bytes, share of backward), for `Work`. Waits for the device."""
        seen = list(self._passes[min(1, len(self._passes) - 1)].values())
        total = sum(nbytes for nbytes, _ in seen)
        if len(seen) < 2 or not total:
            return (0.0, 0.0), (1.0, 1.0)
        moments = [moment for _, moment in seen]
        laps = [between(moments[0], moment) for moment in moments]
        found, gone, wanted = [(0.0, 0.0)], 0, 1 / _POINTS
        for (nbytes, _), lap in zip(seen, laps, strict=True):
            gone += nbytes
            if gone / total >= wanted:
                found.append((gone / total, lap / laps[-1] if laps[-1] > 0 else 1.0))
                wanted = gone / total + 1 / _POINTS
        return (*found[: -1 if found[-1][0] == 1 else None], (1.0, 1.0))
