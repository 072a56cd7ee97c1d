"""`ProductWeight`: the weight of a low-rank layer, which is multiplied out only when a function computes with it."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

#: Functions that ask a tensor for its size, dtype or device.
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
    )]
    + [getattr(Tensor, name) for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device",
        "is_floating_point", "is_complex", "__len__", "__hash__",
    )]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)  # fmt: skip
#: Functions that ask the first tensor for its dtype and device, and others that ask the second one.
_NEW = frozenset(getattr(Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor"))
_CONVERT = frozenset([Tensor.to, Tensor.type_as])
#: Functions that set an attribute, which no version counter shows.
_SET = frozenset(
    [getattr(Tensor, name).__set__ for name in ("data", "grad", "requires_grad")]
    + [Tensor.requires_grad_, Tensor.set_]
)
#: Error message of a write to the weight.
READ_ONLY = (
    "the weight of a low-rank layer is computed from its factors and cannot be changed: change "
    "down.weight and up.weight, call pufferfish.merge_ first, or take a clone()"
)


def asks_metadata(func: Callable[..., Any], args: tuple[Any, ...], tensor: Tensor) -> bool:
    """Whether a torch function asks `tensor` only for its size, dtype or device.

    >>> weight, x = torch.zeros(4, 2), torch.zeros(3)
    >>> asks_metadata(Tensor.size, (weight, 0), weight), asks_metadata(Tensor.sum, (weight,), weight)
    (True, False)
    >>> asks_metadata(Tensor.type_as, (x, weight), weight), asks_metadata(Tensor.type_as, (weight, x), weight)
    (True, False)
    """
    return func in _METADATA or func in _NEW or (func in _CONVERT and args[0] is not tensor)


class ProductWeight(Tensor):
    """Read-only tensor that a low-rank layer computes from its factors, such as `layer.weight`.

    Its size, dtype and device are known without arithmetic, so that code may read `layer.weight.dtype`. All
    other functions compute the product, each time, and run on it as on an ordinary tensor: gradients reach the
    factors. Like a dense weight, it follows updates of the layer.

    A write would be lost, so it raises RuntimeError, also in views. `clone()` returns an ordinary tensor.

    >>> import pufferfish as pf
    >>> layer = pf.layers.LowRankLinear(nn.Linear(6, 5), {"": 2}).to_empty(device="cpu")
    >>> layer.weight.shape, layer.weight.dtype
    (torch.Size([5, 6]), torch.float32)
    >>> nn.init.zeros_(layer.weight)
    Traceback (most recent call last):
    RuntimeError: the weight of a low-rank layer is computed from its factors and cannot be changed: ...
    """

    _is_hf_initialized = True  # `from_pretrained` of transformers calls initializers, which skip such tensors
    _product: Callable[[], Tensor]

    @staticmethod
    def of(compute: Callable[[], Tensor], shape: tuple[int, ...], factors: Iterable[Tensor]) -> Tensor:
        """Return the tensor of this shape that `compute` makes of the factors.

        It is an ordinary tensor where that is needed: in a compiled or exported graph, from which the compiler
        removes unused products, and for factors that are DTensors or quantized tensors.
        """
        factors = tuple(factors)
        plain = (Tensor, nn.Parameter, FakeTensor)  # a plan reads dtypes of fake tensors
        if torch.compiler.is_compiling() or any(type(x) not in plain for x in factors):
            return compute()
        dtype, device = factors[0].dtype, factors[0].device

        def product() -> Tensor:
            # Not in inference mode, in which tensors do not count writes, and not under autocast: a weight has the
            # dtype of its layer. The meta device has no autocast.
            grad = torch.is_grad_enabled()  # which leaving inference mode would enable
            autocast = torch.amp.is_autocast_available(device.type)
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(grad),
                torch.autocast(device.type, enabled=False) if autocast else nullcontext(),
            ):
                return compute()

        requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in factors)
        weight: ProductWeight = Tensor._make_wrapper_subclass(
            ProductWeight, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        weight._product = product
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ProductWeight)]
        if all(asks_metadata(func, args, x) for x in weights):
            with torch._C.DisableTorchFunctionSubclass():
                if func not in _METADATA:
                    like = torch.empty((), dtype=weights[0].dtype, device=weights[0].device)
                    args = pytree.tree_map_only(ProductWeight, lambda x: like, args)
                return func(*args, **kwargs)
        products = {id(x): x._product() for x in weights}
        versions = [x._version for x in products.values()]
        args, kwargs = pytree.tree_map_only(ProductWeight, lambda x: products[id(x)], (args, kwargs))
        result = func(*args, **kwargs)
        if func in _SET or versions != [x._version for x in products.values()]:
            raise RuntimeError(READ_ONLY)
        return pytree.tree_map_only(Tensor, lambda x: _read_only(x, products.values()), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached from C++ and where torch functions are disabled. Autograd is above this and would lose the factors.
        if torch.is_grad_enabled() and any(
            x.requires_grad for x in pytree.tree_leaves(args) if isinstance(x, cls)
        ):
            raise RuntimeError(f"{func}: a low-rank weight is not differentiable here; pass a clone() of it")
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._product(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _read_only(x: Tensor, products: Iterable[Tensor]) -> Tensor:
    """Return `x`, as a ProductWeight if it shares the memory of one of the products."""
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    if isinstance(x, ProductWeight) or not any(is_alias(x, y) for y in products):
        return x
    view = x.as_subclass(ProductWeight)
    view._product = lambda: x
    return view
