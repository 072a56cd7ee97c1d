"""`KnownValues`: a run on meta tensors in which values that do not depend on parameters are known."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from .private_copy import to_meta

aten = torch.ops.aten

#: Values of tensors with more elements are not computed: they take memory, and hardly any code branches on them.
_LARGEST = 1 << 22


class KnownValues(TorchDispatchMode):
    """Run on meta tensors that also computes values, of small tensors which do not depend on parameters.

    Models read such values: whether a mask has padding, where images are in a text, how long sequences are.
    On plain meta tensors that raises. Values that depend on parameters stay unknown: reading them raises. They
    are assumed to be finite, which some models check.

    >>> known = KnownValues()
    >>> mask = known.to_meta(torch.tensor([1, 1, 0]))
    >>> with known:
    ...     print(mask.device, bool(mask.all()), mask.nonzero().shape)
    meta False torch.Size([2, 1])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Meta tensor → CPU tensor. Values of views share memory, so that a write to one changes all.
        self._values = WeakIdKeyDictionary()

    def to_meta(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the meta device. Its value is known unless it is a parameter, or large."""
        copied = to_meta(tensor)
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() <= _LARGEST:
            self._values[copied] = tensor.detach().to("cpu", copy=True)
        return copied

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta" or any(
            x.is_meta for x in tensors
        )
        if not on_meta or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        values = {id(x): self._value(x) for x in tensors}
        known = _depends_on_arguments_only(func) and all(x is not None for x in values.values())
        try:
            result = self._run(func, args, kwargs)
        except Exception:
            if not known:
                raise
            # A number, a copy on another device, or a tensor whose shape depends on values.
            value = _compute(func, args, kwargs, values)
            return value if "device" in kwargs else pytree.tree_map_only(Tensor, self.to_meta, value)
        small = all(x.numel() <= _LARGEST for x in _tensors(result))
        if known and small:
            for x, y in zip(_tensors(result), _tensors(_compute(func, args, kwargs, values)), strict=True):
                self._values[x] = y
        elif small and (finite := _if_finite(func, args)) is not None:
            self._values[result] = torch.full(result.shape, finite)
        else:
            self._forget(_written(func, args, kwargs))
        return result

    def _value(self, x: Tensor) -> Tensor | None:
        value: Tensor | None = self._values.get(x) if x.is_meta else x.detach().cpu()
        return value

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator on meta tensors only, and without the limits that a few have there."""
        written = {id(x) for x in _written(func, args, kwargs)}
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x if x.is_meta or id(x) in written else self.to_meta(x), (args, kwargs)
        )
        if func is aten._grouped_mm.default:  # on meta for bfloat16 only
            a, b, *rest = args
            stack = a if a.dim() == 3 else rest[0] if rest else kwargs["offs"]
            groups = [len(stack)] if a.dim() == b.dim() else []
            return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=kwargs.get("out_dtype"))
        if func is aten.index.Tensor:  # a mask selects as many elements as it has ones
            args = (args[0], [y for x in args[1] for y in self._without_masks(x)])
        return func(*args, **kwargs)

    def _without_masks(self, index: Tensor | None) -> list[Tensor | None]:
        """Return an index; a mask with known values as the indices of its ones."""
        value = None if index is None or index.dtype != torch.bool else self._values.get(index)
        return [index] if value is None else [x.to("meta") for x in value.nonzero().unbind(1)]

    def _forget(self, written: list[Tensor]) -> None:
        """Remove the values of tensors to which something unknown was written, and of all their views."""
        changed = [self._values[x] for x in written if x in self._values]
        for x, value in list(self._values.items()) if changed else ():
            if any(torch._C._is_alias_of(value, y) for y in changed):  # type: ignore[attr-defined]
                del self._values[x]


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _compute(func: Any, args: Any, kwargs: dict[str, Any], values: dict[int, Tensor | None]) -> Any:
    """Run an operator on the CPU with the values of its arguments."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: values[id(x)], (args, kwargs))
    return func(*args, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))


def _depends_on_arguments_only(func: Any) -> bool:
    """Whether the result is a function of the arguments: not random, not uninitialized, not a custom operator."""
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in str(func)
    )


def _if_finite(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Result for finite values of an operator that tells NaN or infinity; None for other operators."""
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    # isfinite is (x == x) * (abs(x) != inf).
    same, not_infinite = func is aten.eq.Tensor, func is aten.ne.Scalar
    return True if (same and args[0] is args[1]) or (not_infinite and args[1] == math.inf) else None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that an operator writes to."""
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
    names = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    return _tensors([given.get(name) for name in names])
