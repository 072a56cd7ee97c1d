"""`SharedInput`: first factors of low-rank layers that read the same tensor, computed as one product."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import autocast_dtype
from .linear import LowRankLinear, is_plain


class SharedInput:
    """Group of low-rank layers that are called with the same tensor, such as the projections of attention.

    The first layer that is called multiplies the input by the first factors of all layers at once, which reads the input
    once instead of once per layer, forward and backward. The others take their part of the result, unless a weight has changed
    since then, or a backward pass has used up its graph. A layer that is called with another tensor, or with one that was
    created in inference mode, or whose first factor is not a plain `nn.Linear` without hooks, computes alone.

    Args:
        layers: At least two layers with equally many inputs.

    >>> import pufferfish as pf
    >>> from torch import nn
    >>> layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    >>> _ = pf.factorize_(layers, pf.plan(layers, 2))
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
        self._waiting: _Waiting | None = None

    def first_product(self, layer: LowRankLinear, input: Tensor) -> Tensor | None:
        """Output of the layer's first factor; None if the layer has to compute it alone."""
        place = next((i for i, other in enumerate(self.active) if other is layer), None)
        weights = self._weights(input)
        if place is None or not weights:
            return None  # `layer` is a replica of DataParallel, or has to compute alone
        mode = _mode(input, weights)
        waiting = self._waiting  # read once: another thread may replace it
        if (
            waiting is None
            or waiting.input is not input
            or waiting.mode != mode
            or place not in waiting.outputs
        ):
            product = _product(input, weights)
            if product.requires_grad and not torch.compiler.is_compiling():
                product.register_hook(self._clear)  # a backward pass frees the graph of what still waits
            parts = product.split([len(w) for w in weights], -1)
            waiting = self._waiting = _Waiting(input, mode, dict(enumerate(parts)))
        output = waiting.outputs.pop(place)
        if not waiting.outputs:
            self._waiting = None  # holds the input no longer than needed
        return output

    def _weights(self, input: Tensor) -> list[Tensor]:
        """First factors that can be multiplied together with this input; none if they cannot."""
        if not all(is_plain(layer.down, input) for layer in self.active):
            return []
        weights = [cast(Tensor, layer.down.weight) for layer in self.active]
        if not torch.compiler.is_compiling() and any(x.is_inference() for x in (input, *weights)):
            return []  # it has no version counter, which would show a change between two calls
        if torch.is_grad_enabled() and len({x.requires_grad for x in weights}) > 1:
            return []  # together, the backward pass would compute the gradients of frozen weights too
        return weights

    def _clear(self, gradient: Tensor) -> None:
        self._waiting = None

    def __getstate__(self) -> dict[str, Any]:
        # Of copies and files: outputs that are waiting can be in neither.
        return {"layers": self.layers, "active": self.layers, "_waiting": None}


class _Waiting(NamedTuple):
    """Outputs that layers have not taken yet."""

    input: Tensor
    mode: tuple[Any, ...]
    outputs: dict[int, Tensor]  # by the layer's place in the group


def _product(input: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if dtype := autocast_dtype(input.device):
        weights = [w.to(dtype) for w in weights]  # before they are joined: half of the bytes to copy
    return F.linear(input, torch.cat(list(weights)))


def _mode(input: Tensor, weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """Everything that the product and its graph depend on besides the objects `input` and `weights`."""
    mode = torch.is_grad_enabled(), autocast_dtype(input.device)
    if torch.compiler.is_compiling():
        return mode  # versions are not known, and one compiled graph contains all calls
    versions = [x._version for x in (input, *weights)]
    # Inside of a checkpoint, tensors are saved in another way than outside.
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    stream = torch.cuda.current_stream(input.device) if input.is_cuda else None
    return *mode, *versions, saving, threading.get_ident(), stream
