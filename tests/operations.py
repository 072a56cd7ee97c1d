"""`Operations`: count the operations that PyTorch runs, a lower limit of the kernels launched on a GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run inside its context, without those that only make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view:
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))
