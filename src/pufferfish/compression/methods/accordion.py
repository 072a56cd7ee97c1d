"""Accordion (Agarwal et al., 2021): light compression while a layer's gradient changes, strong while it does not."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..method import Message, MessageGenerator, Method, StepContext


@dataclass(frozen=True)
class Accordion(Method):
    """Chooses between two methods, for every tensor separately, after every period.

    The averaged gradients of a period are summed, with the same result on all workers. Where the norm of this sum changed
    by half or more from one period to the next, and until two are known, the light method is used; otherwise the strong
    one. When the learning rate has fallen to half (SGD's, if the optimizer is passed to `compress`), the choice starts
    again. Accordion keeps one more tensor for each gradient. A new loss scale counts as a change. The choice is read back
    in every step, so the host waits for the device.

    Args:
        low: The method that compresses lightly.
        high: The method that compresses strongly.
        every: Steps of a period; in the paper, those of ten epochs.
        change: Relative change of the norm from which the light method is used.

    >>> from pufferfish.compression import PowerSGD
    >>> Accordion(low=PowerSGD(4), high=PowerSGD(1), every=1000).kind
    'contraction'
    """

    low: Method
    high: Method
    every: int
    change: float = 0.5

    matrix = True
    reads_units = True
    shared_state = ("light", "count", "total", "norm", "units")

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
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Accordion: every={self.every!r} is not an integer number of steps ≥ 1")
        if not 0 < self.change < float("inf"):
            raise ValueError(f"Accordion: change={self.change!r} is not a finite number > 0")

    @property
    def kind(self) -> str:
        return "contraction" if self.low.kind == "contraction" else self.high.kind

    @property
    def has_momentum(self) -> bool:
        return self.low.has_momentum or self.high.has_momentum

    @property
    def in_units(self) -> tuple[str, ...]:
        return self._of_both("in_units")

    @property
    def divided_state(self) -> tuple[str, ...]:
        return self._of_both("divided_state")

    @property
    def in_scale(self) -> tuple[str, ...]:
        return self._of_both("in_scale")

    def _of_both(self, what: str) -> tuple[str, ...]:
        return tuple(prefix + key for prefix, method in self._both for key in getattr(method, what))

    @property
    def _both(self) -> tuple[tuple[str, Method], ...]:
        return ("low.", self.low), ("high.", self.high)

    @property
    def exchanges(self) -> tuple[str, ...]:
        return tuple(which for which in self.low.exchanges if which in self.high.exchanges)

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        parts = [
            method.unsent(_without_prefix(state, prefix), shape, worker, size)
            for prefix, method in self._both
        ]
        known = [x for x in parts if x is not None]
        return sum(known[1:], known[0]) if known else None

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.low.fits(shape) and self.high.fits(shape)

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        fresh = ctx.state.get("fresh", x.new_ones(len(x), 2, dtype=torch.bool))
        self._reset_after_lr_drop(x, ctx)
        light = ctx.state.get("light", x.new_ones(len(x), dtype=torch.bool))
        mean = ctx.empty(x.shape, x.dtype)
        # Tensors without state of a method yet cannot go together with those that have some.
        groups = torch.stack([~light, torch.where(light, fresh[:, 0], fresh[:, 1])], 1).tolist()
        for group in ([False, False], [False, True], [True, False], [True, True]):
            rows = [i for i, mine in enumerate(groups) if mine == group]
            if rows:
                mean[rows], x[rows] = yield from self._part(x[rows], ctx, rows, *group)
        ctx.state["fresh"] = fresh & torch.stack([~light, light], 1)
        self._decide(mean, light, ctx)
        return mean, x  # x now holds each method's rest

    def _reset_after_lr_drop(self, x: Tensor, ctx: StepContext) -> None:
        """Reset the tensors whose learning rate has fallen to half of its highest since the last reset."""
        now = x.new_tensor(ctx.units or [0.0] * len(x))
        lowest = ctx.state.get("units", now)
        fell = (now >= 2 * lowest) & (lowest > 0)
        follow = fell | (lowest == 0) | ((now > 0) & (now < lowest))
        ctx.state["units"] = torch.where(follow, now, lowest)
        if "light" in ctx.state:
            ctx.state |= {
                "light": ctx.state["light"] | fell,
                "count": ctx.state["count"].masked_fill(fell, 0),
                "total": ctx.state["total"].masked_fill(fell[:, None, None], 0),
                "norm": ctx.state["norm"].masked_fill(fell, -1.0),
            }

    def _part(
        self, x: Tensor, ctx: StepContext, rows: list[int], strong: bool, fresh: bool
    ) -> Generator[Message, Any, tuple[Tensor, Tensor]]:
        """Compress some of the tensors by one of the methods, whose state is kept under a prefix."""
        prefix, method = self._both[strong]
        known = _without_prefix(ctx.state, prefix)
        state = {} if fresh else {key: s[rows] for key, s in known.items()}
        part = replace(ctx, names=tuple(ctx.names[i] for i in rows), state=state)
        mean, rest = yield from method.compress(x if method.matrix else x.flatten(1), part)
        for key, s in part.state.items():
            whole = known[key].clone() if key in known else s.new_zeros(len(ctx.names), *s.shape[1:])
            whole[rows] = s
            ctx.state[prefix + key] = whole
        mean = torch.bmm(*mean) if isinstance(mean, tuple) else mean
        return mean.to(x.dtype).view_as(x), torch.zeros_like(x) if rest is None else rest.view_as(x)

    def _decide(self, mean: Tensor, light: Tensor, ctx: StepContext) -> None:
        """At the end of a period, choose the method of the next one."""
        total = ctx.state.get("total", torch.zeros_like(mean)) + mean
        count = ctx.state.get("count", torch.zeros_like(light, dtype=torch.int32)) + 1
        norm = total.flatten(1).norm(dim=1)
        before = ctx.state.get("norm", torch.full_like(norm, -1.0))
        moved = ~((norm - before).abs() < self.change * before)  # also where none is known (−1)
        over = count >= self.every
        ctx.state.update(
            light=torch.where(over, moved, light),
            count=count.masked_fill(over, 0),
            norm=torch.where(over, norm, before),
            total=total.masked_fill(over[:, None, None], 0),
        )


def _without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """State of the method that is kept under `prefix`, with its own keys."""
    return {key.removeprefix(prefix): s for key, s in state.items() if key.startswith(prefix)}
