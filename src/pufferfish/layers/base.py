"""What every low-rank layer shares: how it is made from its dense layer and how it becomes dense again."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .matrix import Matrix


class LowRank(nn.Module, ABC):
    """A dense layer of which some matrices are two thin ones, `down` (first) and `up` (second).

    A subclass says which matrices a dense layer has (`matrices`), builds the children in `__init__` and
    computes with them in `forward`. The constructor makes the *structure* only, on the meta device;
    `pufferfish.factorize_`, `reshape_` and `load` put the tensors in.
    """

    ranks: dict[str, int]

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__()
        if "forward" in vars(dense):
            # Copied below like any attribute, it would go on computing with the dense weights.
            raise ValueError(
                f"{type(dense).__name__}: its forward was replaced; restore it before factorizing"
            )
        # The dense layer without its tensors: what `merge_` fills again. In a tuple, so that it is not a child.
        self._dense = (hollow(dense),)
        self.ranks = dict(ranks)
        for name, value in vars(dense).items():
            if not name.startswith("_"):  # in_features, stride, training, …
                setattr(self, name, value)

    @classmethod
    @abstractmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        """The matrices of `dense` that may be factorized."""

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        """How many vectors `matrix` was multiplied with in one call: MACs = positions × weights."""
        count: int = output.numel() // (matrix.blocks * matrix.m)
        return count

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        """How many of those vectors backward wants the gradient of."""
        return cls.positions(matrix, args, kwargs, output) if wants_gradient((args, kwargs)) else 0

    def factors(self) -> dict[Matrix, tuple[Tensor, Tensor]]:
        """The (down, up) weights of every matrix that is factorized."""
        return {
            x: (self.get_parameter(x.down), self.get_parameter(x.up))
            for x in self.matrices(self._dense[0])
            if x.name in self.ranks
        }

    def product(self, name: str = "") -> Tensor:
        """The dense parameter that the factors of one matrix stand for."""
        return next(x.product(*pair) for x, pair in self.factors().items() if x.name == name)

    def extra_repr(self) -> str:
        return f"rank={self.ranks['']}" if list(self.ranks) == [""] else f"ranks={self.ranks}"


def wants_gradient(values: Any) -> bool:
    """Whether any tensor in nested containers requires a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(values))


#: Where `nn.Module` keeps the hooks that see a module's inputs and outputs: they mean the same for the
#: low-rank layer and move to it.
CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_backward_pre_hooks",
)


def hollow(module: nn.Module) -> nn.Module:
    """A copy of `module` with meta tensors and without hooks.

    >>> layer = hollow(nn.Linear(4, 2))
    >>> layer.weight.device, layer.in_features
    (device(type='meta'), 4)
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        for name, value in vars(child).items():
            if name.endswith("_hooks") or "_hooks_" in name:
                memo[id(value)] = OrderedDict()
    for parameter in module.parameters():
        meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        memo[id(parameter)] = meta
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)
