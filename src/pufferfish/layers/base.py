"""`LowRank`, the base class of all low-rank layers, and the registry that maps dense types to low-rank types."""

import copy
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .matrix import FactorMap, Matrix
from .product_weight import READ_ONLY, ProductWeight

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LowRank(nn.Module, ABC):
    """A layer in which some weight matrices are products of two thin ones, `down` (first) and `up` (second).

    A subclass lists the matrices of its dense layer (`matrices`), builds the children in `__init__` and
    computes with them in `forward`. The constructor builds the structure only, on the meta device;
    `pufferfish.factorize_`, `reshape_` and `load` fill in the tensors.

    Args:
        dense: Layer to replace. Its public attributes are copied.
        ranks: Rank of each factorized matrix, by `Matrix.name`.
    """

    ranks: dict[str, int]
    # There `pufferfish.plan` leaves the layer dense unless `only` or `overrides` name it.
    slower_on_cuda = False

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__()
        # The dense layer without its tensors, which `merge_` fills again. In a tuple, so that it is not a child.
        self._dense = (meta_copy(dense),)
        self.ranks = dict(ranks)
        for name, value in vars(dense).items():
            if not name.startswith("_"):  # in_features, stride, training, …
                setattr(self, name, value)
                setattr(self._dense[0], name, value)  # not a copy: layers may share a configuration

    @classmethod
    @abstractmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        """Weight matrices of `dense` that can be factorized."""

    @classmethod
    def unfit(cls, dense: nn.Module) -> str:
        """Reason why this layer of a registered type cannot be factorized; "" if it can."""
        return ""

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        """Number of vectors multiplied by `matrix` in one call of the layer: MACs = positions × weights."""
        return int(output.numel() // (matrix.blocks * matrix.m))

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        """Number of these vectors whose gradient is computed in backward."""
        return cls.positions(matrix, args, kwargs, output) if any_requires_grad((args, kwargs)) else 0

    @property
    def factor_map(self) -> FactorMap:
        """The parameters of this layer in both forms, by their names in the layer."""
        return FactorMap(("", x, self.ranks.get(x.name)) for x in self.matrices(self._dense[0]))

    def factors(self) -> dict[Matrix, tuple[Tensor, Tensor]]:
        """(down, up) weights of every factorized matrix."""
        return {
            x: (self.get_parameter(x.down), self.get_parameter(x.up))
            for x in self.matrices(self._dense[0])
            if x.name in self.ranks
        }

    def product(self, name: str = "") -> Tensor:
        """Product of the factors of one matrix, in the shape of the dense parameter."""
        return next(x.product(*pair) for x, pair in self.factors().items() if x.name == name)

    def extra_repr(self) -> str:
        return f"rank={self.ranks['']}" if list(self.ranks) == [""] else f"ranks={self.ranks}"


class LowRankSingle(LowRank):
    """Base class of layers with a single matrix: `up` is applied to the output of `down`."""

    down: nn.Module
    up: nn.Module

    @property
    def weight(self) -> Tensor:
        """Product of the factors, in the shape of the dense weight. Read-only; see `ProductWeight`."""
        ((matrix, factors),) = self.factors().items()
        return ProductWeight.of(lambda: matrix.product(*factors), matrix.shape, factors)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        raise RuntimeError(READ_ONLY)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # `nn.Module` comes here when a Parameter is assigned, as to tie weights, and never to the setter.
        if name == "weight":
            raise RuntimeError(READ_ONLY)
        super().register_parameter(name, param)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.up.bias)

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.down(input)))


#: Low-rank type of each dense type, or of its dotted name.
_REGISTRY: dict[type[nn.Module] | str, type[LowRank]] = {}


def register(dense: type[nn.Module] | str, low_rank: type[LowRank]) -> None:
    """Register the low-rank form of a dense layer type.

    Types match exactly: a subclass of `nn.Linear` may compute something else, so it stays dense until it is
    registered itself. `dense` may be a dotted name, so that its module need not be imported.

    >>> import torch, pufferfish as pf
    >>> class MyLinear(nn.Linear):
    ...     pass
    >>> model = nn.Sequential(MyLinear(64, 64))
    >>> pf.plan(model).entries[0].reason
    'no low-rank form is registered for MyLinear'
    >>> pf.register(MyLinear, pf.layers.LowRankLinear)
    >>> pf.plan(model).entries[0].rank
    16
    """
    if not (isinstance(low_rank, type) and issubclass(low_rank, LowRank)):
        raise TypeError(f"register: {low_rank!r} is not a subclass of pufferfish.layers.LowRank")
    if not (isinstance(dense, str) or (isinstance(dense, type) and issubclass(dense, nn.Module))):
        raise TypeError(f"register: {dense!r} is neither a subclass of nn.Module nor its dotted name")
    _REGISTRY[dense] = low_rank


def low_rank_type(dense: type[nn.Module]) -> type[LowRank] | None:
    """Low-rank type registered for a dense type, or None."""
    return _REGISTRY.get(dense) or _REGISTRY.get(f"{dense.__module__}.{dense.__qualname__}")


def unfit_reason(module: nn.Module) -> str:
    """Reason why a layer of a registered type cannot be factorized as it is; "" if it can."""
    if "forward" in vars(module):  # copied like any attribute, it would still compute with the dense weights
        return "unsupported: its forward was replaced"
    for child in module.modules():
        if hasattr(child, "parametrizations"):
            return "parametrized: remove the parametrization first"
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and any(x.startswith(f"{name}_") for x in child._parameters):
                return f"unsupported: its {name} is computed (weight_norm, spectral_norm, pruning)"
    for parameter in module.parameters():
        if is_lazy(parameter):
            return "lazy: run one batch through the model first"
        if parameter.dtype not in _FLOATS:
            return f"quantized or unusual dtype {str(parameter.dtype).removeprefix('torch.')}"
        if type(parameter.data) is not Tensor and type(parameter.data).__name__ != "DTensor":
            return f"unsupported: its weight is a {type(parameter.data).__name__}, not a plain tensor"
    kind = low_rank_type(type(module))
    return kind.unfit(module) if kind else ""


def check_structure(layer: str, dense: nn.Module, low_rank: LowRank) -> None:
    """Raise ValueError unless a low-rank layer has built its parameters in the shapes that its matrices give them."""
    factor_map, kind = low_rank.factor_map, type(low_rank).__name__
    built = {name: tuple(p.shape) for name, p in low_rank.named_parameters(remove_duplicate=False)}
    expected = {name: tuple(p.shape) for name, p in dense.named_parameters() if name in built}
    for name in factor_map.targets:
        weight = torch.empty(dense.get_parameter(name).shape, device="meta")
        try:
            # Slices of W have the shapes of U and V.
            pieces = factor_map.split(name, weight, lambda part, W: (W[..., : part.rank], W[:, : part.rank]))
            expected |= {target: tuple(x.shape) for target, x in pieces}
        except RuntimeError as error:  # of reshape
            raise ValueError(f"{layer}: the matrices of {kind} do not fit its {name}: {error}") from None
    for name in expected | built:
        here, there = built.get(name, "missing"), expected.get(name, "missing")
        if here != there:
            raise ValueError(
                f"{layer}: {name} of {kind} is {here}, but {there} by its matrices; make them agree"
            )


def any_requires_grad(values: Any) -> bool:
    """Whether any tensor in nested containers requires a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(values))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the active autocast on a device, or None."""
    # torch raises for the meta device, which has no autocast.
    enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


#: Attributes of `nn.Module` with the hooks that see inputs and outputs. These hooks mean the same for the
#: low-rank layer, so they move to it.
CALL_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_is_full_backward_hook", "_backward_pre_hooks",
)  # fmt: skip

#: All attributes of `nn.Module` that hold hooks.
HOOKS = tuple(k for k, value in vars(nn.Module()).items() if "_hooks" in k and isinstance(value, dict))


def kept_as_they_are(module: nn.Module) -> dict[int, Any]:
    """Attributes that cannot be copied, process groups and locks, for the memo of `deepcopy`."""
    kinds: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))
    if dist.is_available():
        kinds = *kinds, dist.ProcessGroup
    values = (x for child in module.modules() for x in vars(child).values())
    return {id(x): x for x in values if isinstance(x, kinds)}


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy of `module` with meta tensors and without hooks.

    >>> layer = meta_copy(nn.Linear(4, 2))
    >>> layer.weight.device, layer.in_features
    (device(type='meta'), 4)
    """
    # By exact attribute: other libraries have flags with "hooks" in their names, and a flag is the same object
    # everywhere.
    memo: dict[int, Any] = {id(getattr(child, k)): OrderedDict() for child in module.modules() for k in HOOKS}
    memo |= kept_as_they_are(module)
    for value in (x for child in module.modules() for x in vars(child).values()):
        if isinstance(value, Tensor) and not value.is_leaf:  # such as a loss of the last forward pass
            memo[id(value)] = value.detach().to("meta")
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)
