"""`RewindPoint`: a copy of the state that updates change, to undo updates that only try something out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RewindPoint:
    """Copies tensors, the states of other parts and of the random generators; `rewind` restores them in place.

    The copies are in the host's memory, as the device's may be full.

    Args:
        tensors: of one device.
        parts: objects with `state_dict` and `load_state_dict`, such as a GradScaler.

    >>> x = torch.zeros(2)
    >>> start = RewindPoint([x])
    >>> drawn = x.uniform_().tolist()
    >>> start.rewind()
    >>> x.tolist(), torch.rand(2).tolist() == drawn
    ([0.0, 0.0], True)
    """

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[Any] = ()) -> None:
        self._tensors, self._parts = list(tensors), list(parts)
        self._copies = [x.detach().to("cpu", copy=True) for x in self._tensors]
        self._states = [part.state_dict() for part in self._parts]
        self._devices = sorted({x.device.index for x in self._tensors if x.is_cuda})
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in self._devices]

    @torch.no_grad()
    def rewind(self, *, random: bool = True) -> None:
        """Restore everything; the states of the global random generators only if `random`."""
        for x, copy in zip(self._tensors, self._copies, strict=True):
            x.copy_(copy)
        for part, state in zip(self._parts, self._states, strict=True):
            part.load_state_dict(state)
        if random:
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1], strict=True):
                torch.cuda.set_rng_state(state, device)
