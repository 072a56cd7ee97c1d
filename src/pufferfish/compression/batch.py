"""`Batch`: gradients that go through one call of a method: their layout, error feedback and the method's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from .method import Mean, Method
from .methods.accordion import Accordion
from .methods.powersgd import row_blocks
from .methods.sums import NoCompression
from .settings import Settings

#: Bytes of the first bucket, where several are sent one after the other.
FIRST_BUCKET = 2**20


@dataclass(
    eq=False
)  # compared by identity: as a key it would hash all its names and shapes many times a step
class Batch:
    """Parameters that go through one call of a method, as rows of equal shape or all in one row."""

    method: Method
    policy: Method  # that of the settings; an `Accordion` chooses `method` for each of its tensors
    error_feedback: bool
    row: bool  # one after the other in a single row: elementwise methods, global scope
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    #: Error feedback: the part of earlier gradients that was not sent, in the layout of x. None: nothing yet.
    error: Tensor | None = None
    #: The method's own state, in its layout.
    state: dict[str, Tensor] = field(default_factory=dict)
    _scratch: list[Tensor] = field(default_factory=list)  # memory that `empty` lends in every step
    lent: int = 0  # tensors that `empty` has lent in this step

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor passed to `compress`."""
        b, first = len(self.names), self.shapes[0]
        if self.row:
            return 1, sum(self.sizes)
        return (b, first[0], first[1:].numel()) if self.method.matrix else (b, first.numel())

    @cached_property
    def precision(self) -> torch.dtype:
        """Dtype of the tensor passed to `compress`."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def zeros_stay_zero(self) -> bool:
        """Whether the mean of all-zero gradients is zero in any case."""
        return self.method.kind in ("exact", "rounding")

    @cached_property
    def _meta(self) -> list[Tensor]:
        return [torch.empty(shape, device="meta") for shape in self.shapes]

    @cached_property
    def _sizes_on(self) -> dict[torch.device, Tensor]:
        return {}  # copied to a device once: a copy would wait for it

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory for this step. A CPU reuses that of the last step: page faults cost more than copies."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.lent == len(self._scratch):
            self._scratch.append(torch.empty(0, dtype=torch.uint8))
        if len(self._scratch[self.lent]) < nbytes:
            self._scratch[self.lent] = torch.empty(nbytes, dtype=torch.uint8)
        self.lent += 1
        return self._scratch[self.lent - 1][:nbytes].view(dtype).view(tuple(shape))

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of x, in the layout of `shape`, one for each parameter, in its shape."""
        if self.row or x.is_contiguous():  # one call: views made one by one took a third of a plain step
            return list(_unflatten_dense_tensors(x.view(-1), self._meta))
        return [piece.reshape(shape) for piece, shape in zip(x.unbind(0), self.shapes, strict=True)]

    def where(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """`new` where `mask` (one flag, or one for each parameter) is true, else `old`."""
        if mask.device.type == "cpu" and bool(mask.all()):
            return new  # saves a pass; on a GPU reading the mask would cost more
        if mask.dim() == 1 and self.row:
            if mask.device not in self._sizes_on:
                self._sizes_on[mask.device] = torch.tensor(self.sizes, device=mask.device)
            mask = mask.repeat_interleave(self._sizes_on[mask.device], output_size=new.numel())
        elif mask.dim() == 1:
            mask = mask.view(-1, *[1] * (new.dim() - 1))
        return torch.where(mask, new, old)

    def multiply(self, left: Tensor, right: Tensor, out: Sequence[Tensor]) -> None:
        """Write the products of two thin factors, (b, m, r) and (b, r, n), into the parameters' tensors, on a CPU.

        It takes one pass over memory less than a product that is copied.
        """
        _, m, n = self.shape
        for first, second, x in zip(left.contiguous().split(1), right, out, strict=True):
            target = x.view(1, m, n) if x.is_contiguous() else x.new_empty(1, m, n)
            for place, some in row_blocks(target, first):
                torch.bmm(some, second.expand(len(place), -1, -1), out=place)
            if not x.is_contiguous():
                x.copy_(target.view(x.shape))

    def watch(self, mean: Mean, state: dict[str, Tensor], units: Mapping[str, float]) -> None:
        """Let the policy, if there is one, note the means of a step in the state that is to be kept."""
        if isinstance(self.policy, Accordion):
            mean = torch.bmm(*mean) if isinstance(mean, tuple) else mean
            self.policy.watch(mean.to(self.precision), state, [units.get(name, 0.0) for name in self.names])

    def changes(self) -> bool:
        """Whether the policy, an `Accordion`, has chosen another method for any of the parameters."""
        assert isinstance(self.policy, Accordion)
        lights = self.state["light"].tolist() if "light" in self.state else ()
        return any(self.policy.choose(light) != self.method for light in lights)

    def commit(self, state: Mapping[str, Tensor], rest: Tensor | None, ok: Tensor, used: Tensor) -> None:
        """Keep a step's state and error feedback: nothing if not `ok`, and only of the parameters in `used`.

        `rest` may lie in memory that the next step overwrites. Never waits for the device, except when there is something
        to keep for the first time.
        """
        old = self.error
        if rest is None or not self.error_feedback:
            if old is not None:  # left by another method, and sent with this step
                left = self.where(used, torch.zeros_like(old), old)
                self.error = left if bool(left.any()) else None
        elif old is None:
            self.error = self.where(used, rest.clone(), torch.zeros_like(rest))
        elif (new := self.where(used, rest, old)) is not rest:
            self.error = new
        elif (
            self._scratch
            and self._scratch[0].data_ptr() == rest.data_ptr()
            and self._scratch[0].nbytes == rest.nbytes
        ):
            # rest is x itself: swap their memory instead of copying
            self.error, self._scratch[0] = rest, old.view(-1).view(torch.uint8)
        else:
            old.copy_(rest)
        for key, value in state.items():
            known = self.state.get(key)
            if known is not None and known.shape == value.shape:
                self.state[key] = value if value is known else self.where(used, value, known)
            elif bool(ok):  # new state: that of unused parameters is zero if it accumulates gradients
                fresh = key in self.method.in_units
                self.state[key] = self.where(used, value, torch.zeros_like(value)) if fresh else value

    def stack(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """State of each parameter in the method's layout; None if it does not fit there."""
        if all(x.shape == shape for x, shape in zip(tensors, self.shapes, strict=True)):
            if self.row:
                return torch.cat([x.reshape(-1) for x in tensors])[None]
            return torch.stack([x.reshape(self.shape[1:]) for x in tensors])
        if self.row or any(x.shape != tensors[0].shape for x in tensors):
            return None
        return torch.stack(list(tensors))

    def unstack(self, state: Tensor) -> list[Tensor]:
        """State for each parameter; in its shape where state has the shape of x."""
        if state.shape == self.shape:
            return self.split(state)
        assert not self.row, f"{self.method}: state of tensors in one row must have the shape of x"
        return list(state.unbind(0))


@dataclass(frozen=True)
class Layout:
    """Batches that are sent together, fixed until the gradients or the settings change."""

    parts: list[list[Batch]]  # buckets
    own: list[Batch]  # all batches, or none where another worker of this machine exchanges them
    number: dict[Batch, int]  # its key in `Exchange`; 0 is the sum of the flags "not finite" and "used"
    waits_for: dict[int, list[str]]  # part → gradients that must all be there before it is sent
    device: torch.device


def make_batches(
    settings: Settings,
    gradients: Mapping[str, Tensor],
    kept: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> list[Batch]:
    """Group gradients by method, layout and dtype, in the order of their names; empty ones are left out.

    `kept`: the state of each parameter, by which an `Accordion` chooses.

    >>> from pufferfish.compression import TopK
    >>> g = {"a": torch.ones(8, 4), "b": torch.ones(4, 8), "c": torch.ones(4)}
    >>> [(b.method, b.names) for b in make_batches(Settings(TopK(), smallest=10), g)]
    [(TopK(k=0.01, sample=1.0), ('a', 'b')), (NoCompression(), ('c',))]
    """
    groups: dict[tuple[Method, Method, bool, Any, torch.dtype], list[str]] = {}
    for name, policy in settings.choose(sorted(gradients)).items():
        shape = gradients[name].shape
        if shape.numel() == 0:
            continue
        small = settings.smallest > 0 and (len(shape) < 2 or shape.numel() < settings.smallest)
        vector = policy.matrix and len(shape) < 2
        exempt = len(shape) == 0 if policy.small_too else small or vector
        if not policy.elementwise and (exempt or not policy.fits(shape)):
            policy = NoCompression()
        method = policy
        if isinstance(policy, Accordion):
            method = policy.choose(bool((kept or {}).get(name, {}).get("light", True)))
        row = policy.elementwise or settings.scope == "global"
        form = None if row else (shape[0], shape.numel()) if method.matrix else shape.numel()
        groups.setdefault((method, policy, row, form, gradients[name].dtype), []).append(name)
    return [
        Batch(
            method=method,
            policy=policy,
            error_feedback=settings.has_error_feedback(method),
            row=row,
            names=tuple(names),
            shapes=tuple(gradients[name].shape for name in names),
            dtype=dtype,
            device=gradients[names[0]].device,
        )
        for (method, policy, row, _, dtype), names in groups.items()
    ]


def make_buckets(gradients: Mapping[str, Tensor], nbytes: int | None) -> list[list[str]]:
    """Names of the gradients that are sent together, in reverse order: the last layers' gradients are ready first.

    The first bucket is small, like DDP's, so that the link is used early; not where all gradients are small, because
    that would only add a message. `nbytes` None: one bucket.

    >>> make_buckets({"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2)}, 16)
    [['c', 'b'], ['a']]
    >>> make_buckets(dict.fromkeys("abcd", torch.empty(4, 2**20, dtype=torch.int8)), 2**23)
    [['d'], ['c', 'b'], ['a']]
    """
    if nbytes is None:
        return [list(reversed(list(gradients)))]
    small = sum(x.nbytes for x in gradients.values()) < 8 * FIRST_BUCKET
    buckets: list[list[str]] = [[]]
    size, limit = 0, nbytes if small else min(FIRST_BUCKET, nbytes)
    for name in reversed(list(gradients)):
        if size >= limit:
            buckets.append([])
            size, limit = 0, nbytes
        buckets[-1].append(name)
        size += gradients[name].nbytes
    return buckets
