"""How many bytes tensors hold at once."""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pufferfish.layers.names import local_part


class Live(TorchDispatchMode):
    """The most bytes that tensors have held at once: every storage that an operation gave or that was there.

    Not counted is what an operation takes and gives back while it runs: LAPACK's workspace.
    """

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.add(there)
        self.start = self.peak = self.now()

    def add(self, values: Any) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and not x.is_meta:
                self.storages.add(local_part(x.detach()).untyped_storage())

    def now(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        for _ in range(200):  # gloo's thread lets go of a message a moment after it has arrived
            if self.now() <= self.peak:
                return result
            os.sched_yield()
        self.peak = self.now()
        return result
