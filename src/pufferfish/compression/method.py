"""What a compression method is: settings, and one generator that says what the workers must exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .turn import Turn


@dataclass(frozen=True)
class Sum:
    """Answered with the sum over all workers: an all-reduce. The tensor is given away: the answer may lie in it."""

    tensor: Tensor


@dataclass(frozen=True)
class Gather:
    """Answered with a list over the workers of what each sent: an all-gather. Read the answers, never change them."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, tuple):
            raise TypeError("Gather takes a tuple of tensors, also for one: Gather((x,))")


@dataclass(frozen=True)
class Scatter:
    """`pieces[j]` goes to worker j; answered with a list over the workers of what each sent here: an all-to-all.

    The pieces for one worker have the same shapes wherever they come from.
    """

    pieces: tuple[tuple[Tensor, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.pieces, tuple) or not all(isinstance(piece, tuple) for piece in self.pieces):
            raise TypeError("Scatter takes a tuple of tensors for each worker, in a tuple")


@dataclass(frozen=True)
class Together:
    """Answered with `work` on it. Nothing is sent: all batches that ask for the same work are done in one call.

    `work` takes their tensors and the step's number and gives as many. For small things, whose time is that of the calls.
    """

    work: Callable[[list[Tensor], int], list[Tensor]]
    tensor: Tensor
    step: int


Message = Sum | Gather | Scatter | Together
#: Yields messages, is sent the answers, returns the mean and the rest.
Steps = Generator[Message, Any, tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Method:
    """A way to average gradients with fewer bytes. To add one: a frozen dataclass with `compress`.

    >>> import torch
    >>> from pufferfish.compression import Aggregator, Simulated
    >>> @dataclass(frozen=True)
    ... class Int8(Method):  # one scale for each tensor
    ...     def compress(self, x, turn):
    ...         scale = x.abs().amax(1, keepdim=True) / 127
    ...         q = (x / scale.clamp_min(1e-30)).round().to(torch.int8)
    ...         everyone = yield Gather((q, scale))
    ...         mean = sum(q_ * scale_ for q_, scale_ in everyone) / turn.size
    ...         return mean, x - q * scale
    >>> two = Aggregator(Int8(), Simulated(2), smallest=0)
    >>> two.together([{"w": torch.tensor([1.0, 0.5])}, {"w": torch.tensor([3.0, 0.0])}])[0]
    {'w': tensor([2.0, 0.252])}
    """

    #: Whether x is (b, m, n), the matrix a gradient unrolls to, instead of (b, d).
    matrix: ClassVar[bool] = False
    #: Element by element: all tensors, also 1-D and small ones, in one row, whatever their shapes.
    elementwise: ClassVar[bool] = False
    #: Whether it may choose among all tensors at once (scope="global") and not only inside each.
    sparse: ClassVar[bool] = False
    #: What it keeps in `turn.state` that is equal on all workers and means something to another number of them.
    shared_state: ClassVar[tuple[str, ...]] = ()

    @property
    def has_momentum(self) -> bool:
        """Whether it has a momentum of its own, which an optimizer's would multiply."""
        return False

    @property
    def in_scale(self) -> tuple[str, ...]:
        """What it keeps there that follows the loss scale, but not the learning rate: momenta."""
        return ()

    @property
    def in_units(self) -> tuple[str, ...]:
        """What it keeps there in the gradients' units, to be scaled with the memory when those change."""
        return ()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Of "all_reduce", "all_gather", "all_to_all": what a user may ask for by `exchange=`, its own choice first.

        The method follows `turn.exchange`.
        """
        return ()

    @property
    def kind(self) -> str:
        """Its row in `table.KINDS`: whether a memory goes with it."""
        return "contraction"

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, rank: int, size: int) -> Tensor | None:
        """What `state` holds of one parameter's gradients that was not sent yet, besides the memory.

        It becomes a memory when another method follows.
        """
        return None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape becomes smaller; else it travels as it is."""
        return True

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        """Average b tensors of one shape.

        Args:
            x: gradients with the memory added: fp32 (fp64 for such gradients), finite, the method's own to change.
            turn: who we are, which step it is, random streams, and what was kept from the step before.

        Returns:
            The mean over the workers, in any float type, bit for bit the same on all of them, and the rest: the part of
            x that this worker did not send, which becomes its memory. None for methods that go without.
        """
        raise NotImplementedError


def count(k: float | int, d: int) -> int:
    """How many of `d`: a share when `k` is a float, a number when it is an int; at least one.

    >>> count(0.01, 1000), count(0.01, 10), count(50, 20)
    (10, 1, 20)
    """
    return min(d, max(1, math.ceil(k * d) if isinstance(k, float) else k))


def check_count(who: str, k: float | int) -> None:
    """Refuse what is neither a share nor a number of elements."""
    share = isinstance(k, float) and 0 < k <= 1
    number = isinstance(k, int) and not isinstance(k, bool) and k >= 1
    if not (share or number):
        raise ValueError(
            f"{who}: k={k!r} is neither a share (a float in (0, 1]) nor a number of elements (an int ≥ 1)"
        )
