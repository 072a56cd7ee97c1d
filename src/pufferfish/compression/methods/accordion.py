"""Accordion (Agarwal et al., 2021): light compression while a layer's gradient changes, strong while it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import Kept, Method, check_whole

#: Relative change of the norm from which the light method is used, as in the paper.
_CHANGE = 0.5


@dataclass(frozen=True)
class Accordion(Method):
    """Chooses between two methods, for every tensor separately, after every period.

    The averaged gradients of a period are summed, with the same result on all workers. Where the norm of this sum changed
    by half or more from one period to the next, and until two are known, the light method is used; otherwise the strong
    one. After a step in which the learning rate has fallen to half (SGD's, if the optimizer is passed to `compress`), the
    choice starts again. A new loss scale counts as such a change. A change of method keeps error feedback, as `hook.use`
    does; other state of the old method is dropped. Accordion keeps one more tensor for each gradient. The choice is read
    in every step, so the host waits for the device.

    Args:
        low: The method that compresses lightly.
        high: The method that compresses strongly.
        every: Steps of a period; in the paper, those of ten epochs.

    >>> from pufferfish.compression import PowerSGD
    >>> Accordion(low=PowerSGD(4), high=PowerSGD(1), every=1000).kind
    'contraction'
    """

    low: Method
    high: Method
    every: int

    layout = "matrices"
    state: ClassVar = dict.fromkeys(("light", "count", "total", "norm", "unit"), Kept("shared"))

    def __post_init__(self) -> None:
        for name, method in (("low", self.low), ("high", self.high)):
            if not isinstance(method, Method):
                raise TypeError(f"Accordion: {name}={method!r} is not a compression method")
            if method.kind == "own":
                raise ValueError(
                    f"Accordion: {type(method).__name__} has its own error feedback, which the other method would not send; choose another"
                )
        if (self.low.kind == "vote") != (self.high.kind == "vote"):
            raise ValueError(
                "Accordion: votes and averages have different magnitudes; use two votes or two averages"
            )
        check_whole(self, "every")

    @property
    def kind(self) -> str:
        return "contraction" if self.low.kind == "contraction" else self.high.kind

    @property
    def has_momentum(self) -> bool:
        return self.low.has_momentum or self.high.has_momentum

    @property
    def exchanges(self) -> tuple[str, ...]:
        return tuple(which for which in self.low.exchanges if which in self.high.exchanges)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.low.fits(shape) and self.high.fits(shape)

    def choose(self, light: bool) -> Method:
        """The method of a tensor."""
        return self.low if light else self.high

    def watch(self, mean: Tensor, state: dict[str, Tensor], units: Sequence[float]) -> None:
        """Add the means of a step to the state of b tensors; at the end of a period, choose their methods.

        `units`: see `Engine.average`; they double when the learning rate falls to half.
        """
        now = mean.new_tensor(units)
        lowest = state.get("unit", now)
        fell = (now >= 2 * lowest) & (lowest > 0)
        follow = fell | (lowest == 0) | ((now > 0) & (now < lowest))
        light = state.get("light", torch.ones_like(fell)) | fell
        before = state.get("norm", torch.full_like(now, -1.0)).masked_fill(fell, -1.0)
        count = state.get("count", torch.zeros_like(fell, dtype=torch.int32)).masked_fill(fell, 0) + 1
        each = (-1, *[1] * (mean.dim() - 1))
        total = state.get("total", torch.zeros_like(mean)).masked_fill(fell.view(each), 0) + mean
        norm = total.flatten(1).norm(dim=1)
        moved = ~((norm - before).abs() < _CHANGE * before)  # also where none is known (−1)
        over = count >= self.every
        state.update(
            light=torch.where(over, moved, light),
            count=count.masked_fill(over, 0),
            total=total.masked_fill(over.view(each), 0),
            norm=torch.where(over, norm, before),
            unit=torch.where(follow, now, lowest),
        )
