"""`Batch`: the tensors that go through one call of a method, and which those are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from . import settings as table
from .method import Method
from .methods.casts import NoCompression
from .settings import Methods

#: Bytes of the first piece, where several go out one after the other.
FIRST = 2**20


@dataclass(frozen=True, eq=False)
class Batch:
    """Parameters that go through one call of a method: rows of equal shape, or all in one row.

    Each is equal to itself alone: as a key it would else hash all its names and shapes, many times a step.
    """

    method: Method
    memory: bool
    row: bool  # one after the other in a single row: elementwise methods, global scope
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def _like(self) -> list[Tensor]:
        return [torch.empty(shape, device="meta") for shape in self.shapes]

    @cached_property
    def _sizes_on(self) -> dict[torch.device, Tensor]:
        return {}  # sent to a device once: sending would wait for it

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the method's x."""
        b, first = len(self.names), self.shapes[0]
        if self.row:
            return 1, sum(self.sizes)
        return (b, first[0], first[1:].numel()) if self.method.matrix else (b, first.numel())

    @cached_property
    def precision(self) -> torch.dtype:
        """Of the method's x."""
        return torch.promote_types(self.dtype, torch.float32)

    def _laid_out(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.row:
            return torch.cat([x.reshape(-1) for x in tensors])[None]
        return torch.stack([x.reshape(self.shape[1:]) for x in tensors])

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of the method's x, one for each parameter, in its shape."""
        if self.row or x.is_contiguous():  # one call: views made one by one took a third of a plain step
            return list(_unflatten_dense_tensors(x.view(-1), self._like))
        return [piece.reshape(shape) for piece, shape in zip(x.unbind(0), self.shapes, strict=True)]

    def where(self, each: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """`new` for the parameters where `each` is true, `old` for the others."""
        if each.device.type == "cpu" and bool(each.all()):
            return new  # a pass saved; on a GPU looking would cost more
        if each.dim() == 0:
            mask = each
        elif self.row:
            if each.device not in self._sizes_on:
                self._sizes_on[each.device] = torch.tensor(self.sizes, device=each.device)
            mask = each.repeat_interleave(self._sizes_on[each.device], output_size=new.numel())
        else:
            mask = each.view(-1, *[1] * (new.dim() - 1))
        return torch.where(mask, new, old)

    def stack(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """State of each parameter as the method keeps it; None if it does not fit here."""
        if all(x.shape == shape for x, shape in zip(tensors, self.shapes, strict=True)):
            return self._laid_out(tensors)
        if self.row or any(x.shape != tensors[0].shape for x in tensors):
            return None
        return torch.stack(list(tensors))

    def unstack(self, state: Tensor) -> list[Tensor]:
        """State for each parameter: in its shape where it is like the gradient."""
        if state.shape == self.shape:
            return self.split(state)
        assert not self.row, f"{self.method}: state of tensors in one row must have the shape of x"
        return list(state.unbind(0))


def batches(
    methods: Methods, gradients: Mapping[str, Tensor], memory: bool | None, scope: str, smallest: int
) -> list[Batch]:
    """Which tensors go together, in the order of their names; empty ones go nowhere.

    >>> g = {"a": torch.ones(8, 4), "b": torch.ones(4, 8), "c": torch.ones(4)}
    >>> from pufferfish.compression import TopK
    >>> [(b.method, b.names) for b in batches(TopK(), g, None, "layer", smallest=10)]
    [(TopK(k=0.01, sample=1.0), ('a', 'b')), (NoCompression(), ('c',))]
    """
    groups: dict[tuple[Method, bool, Any, torch.dtype], list[str]] = {}
    for name, method in table.choose(methods, sorted(gradients)).items():
        shape = gradients[name].shape
        if shape.numel() == 0:
            continue
        small = smallest > 0 and (len(shape) < 2 or shape.numel() < smallest)
        vector = method.matrix and len(shape) < 2
        if not method.elementwise and (small or vector or not method.fits(shape)):
            method = NoCompression()
        row = method.elementwise or scope == "global"
        form = None if row else (shape[0], shape.numel()) if method.matrix else shape.numel()
        groups.setdefault((method, row, form, gradients[name].dtype), []).append(name)
    return [
        Batch(
            method=method,
            memory=memory is not False and table.has_memory(method, None),
            row=row,
            names=tuple(names),
            shapes=tuple(gradients[name].shape for name in names),
            dtype=dtype,
        )
        for (method, row, _, dtype), names in groups.items()
    ]


def pieces(like: Mapping[str, Tensor], nbytes: int | None) -> list[list[str]]:
    """Names of what goes out together. Those used last have their gradients first, so they come first.

    The first piece is small, like DDP's first bucket: the link has something to do early. Where all is small it would
    only be one message more.

    >>> pieces({"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2)}, 16)
    [['c', 'b'], ['a']]
    >>> pieces(dict.fromkeys("abcd", torch.empty(4, 2**20, dtype=torch.int8)), 2**23)
    [['d'], ['c', 'b'], ['a']]
    """
    if nbytes is None:
        return [list(reversed(list(like)))]
    small = sum(x.nbytes for x in like.values()) < 8 * FIRST
    found: list[list[str]] = [[]]
    size, limit = 0, nbytes if small else min(FIRST, nbytes)
    for name in reversed(list(like)):
        if size >= limit:
            found.append([])
            size, limit = 0, nbytes
        found[-1].append(name)
        size += like[name].nbytes
    return found
