"""`LiveStorages`: the memory that a computation leaves allocated, by the tensors that its operators return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Records the storages of all operators' outputs while it is active.

    Unlike `saved_tensors_hooks` it also sees what checkpointing keeps beside the graph.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {x.untyped_storage()._cdata for x in known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self._known:
                self._seen[key] = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        return output

    def nbytes(self) -> int:
        """Bytes of the recorded storages that something still holds."""
        return sum(size for storage, size in self._seen.values() if not storage.expired())
