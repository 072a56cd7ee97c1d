"""`SharedInput`: first factors of low-rank layers that read the same tensor, computed as one product."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import LowRankLinear, is_plain


class SharedInput:
    """Group of low-rank layers that are called with the same tensor, such as the projections of attention.

    The first layer that is called multiplies the input by the first factors of all layers at once, which reads the input
    once instead of once per layer, forward and backward. The others take their part of the result. A layer that is
    called with another tensor, or whose first factor is not a plain `nn.Linear` without hooks, computes alone.

    Args:
        layers: At least two layers with equally many inputs.

    >>> import pufferfish as pf
    >>> from torch import nn
    >>> layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    >>> _ = pf.factorize_(layers, pf.plan(layers, 2, multiple=1))
    >>> q, k = layers
    >>> x = torch.randn(3, 8)
    >>> alone = k(x)
    >>> _ = SharedInput([q, k])
    >>> _ = q(x)
    >>> torch.allclose(k(x), alone)
    True
    """

    def __init__(self, layers: Sequence[LowRankLinear]) -> None:
        self.layers = tuple(layers)
        self.active = self.layers  # those that the next calls pass the same tensor to
        for layer in layers:
            layer._shared_input = self
        self._clear()

    def _clear(self) -> None:
        self._input: Tensor | None = None
        self._mode: tuple[Any, ...] = ()
        self._outputs: dict[int, Tensor] = {}

    def first_product(self, layer: LowRankLinear, input: Tensor) -> Tensor | None:
        """Output of the layer's first factor; None if the layer has to compute it alone."""
        place = next((i for i, other in enumerate(self.active) if other is layer), None)
        if place is None or not all(is_plain(other.down, input) for other in self.active):
            return None  # `layer` is a replica of DataParallel, or a module has changed
        mode = _mode(input)
        if place not in self._outputs or self._input is not input or self._mode != mode:
            weights = [cast(Tensor, other.down.weight) for other in self.active]
            parts = _product(input, weights).split([len(w) for w in weights], -1)
            self._input, self._mode, self._outputs = input, mode, dict(enumerate(parts))
        output = self._outputs.pop(place)
        if not self._outputs:
            self._clear()  # holds the input no longer than needed
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        copied = memo[id(self)] = SharedInput(())  # outputs that are waiting cannot be copied
        copied.layers = copied.active = copy.deepcopy(self.layers, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "active": self.layers, "_input": None, "_mode": (), "_outputs": {}}


def _product(input: Tensor, weights: Sequence[Tensor]) -> Tensor:
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        weights = [w.to(dtype) for w in weights]  # before they are joined: half of the bytes to copy
    return F.linear(input, torch.cat(list(weights)))


def _mode(input: Tensor) -> tuple[Any, ...]:
    """Everything that the product depends on besides the input and the weights."""
    device = input.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    version = None if torch.compiler.is_compiling() or input.is_inference() else input._version
    return version, torch.is_grad_enabled(), torch.get_autocast_dtype(device) if autocast else None
