"""Accordion (Agarwal et al., 2021): light compression while a layer's gradient changes, strong while it does not."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..method import Message, Method, Steps
from ..turn import Turn


@dataclass(frozen=True)
class Accordion(Method):
    """Chooses between two methods, for every tensor on its own, again after every period.

    The averaged gradients of a period are added up, on all workers alike. Where the norm of this sum moved by half or
    more from one period to the next, and until it is known for two, the light method is used; else the strong one.
    When the learning rate has fallen to half (SGD's, where `compress` is given the optimizer), all starts anew.
    That keeps one more tensor for each gradient. Another loss scale is a change. The flags are read back in every
    step, for which the host waits.

    Args:
        low: the method that compresses lightly.
        high: the method that compresses strongly.
        every: steps of a period. The paper's is ten epochs.
        change: the share of its norm by which a sum has to move.

    >>> from pufferfish.compression import PowerSGD
    >>> Accordion(low=PowerSGD(4), high=PowerSGD(1), every=1000).kind
    'contraction'
    """

    low: Method
    high: Method
    every: int
    change: float = 0.5

    matrix = True
    shared_state = ("light", "count", "total", "norm", "units")

    def __post_init__(self) -> None:
        for name, method in (("low", self.low), ("high", self.high)):
            if not isinstance(method, Method):
                raise TypeError(f"Accordion: {name}={method!r} is not a compression method")
            if method.kind == "own":
                raise ValueError(
                    f"Accordion: {type(method).__name__} keeps a memory of its own, which the other method would not send"
                )
        if (self.low.kind == "vote") != (self.high.kind == "vote"):
            raise ValueError(
                "Accordion: votes and averages have different sizes; take two methods of one sort"
            )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Accordion: every={self.every!r} is not a whole number of steps ≥ 1")
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
    def in_scale(self) -> tuple[str, ...]:
        return self._of_both("in_scale")

    def _of_both(self, what: str) -> tuple[str, ...]:
        both = (("low", self.low), ("high", self.high))
        return tuple(f"{which}.{key}" for which, method in both for key in getattr(method, what))

    @property
    def exchanges(self) -> tuple[str, ...]:
        return tuple(which for which in self.low.exchanges if which in self.high.exchanges)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.low.fits(shape) and self.high.fits(shape)

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        fresh = turn.state.get("fresh", x.new_ones(len(x), 2, dtype=torch.bool))
        self._start_anew(x, turn)
        light = turn.state.get("light", x.new_ones(len(x), dtype=torch.bool))
        mean = turn.empty(x.shape, x.dtype)
        # Tensors without state of a method yet cannot go together with those that have some.
        groups = torch.stack([~light, torch.where(light, fresh[:, 0], fresh[:, 1])], 1).tolist()
        for group in ([False, False], [False, True], [True, False], [True, True]):
            rows = [i for i, mine in enumerate(groups) if mine == group]
            if rows:
                mean[rows], x[rows] = yield from self._part(x[rows], turn, rows, *group)
        turn.state["fresh"] = fresh & torch.stack([~light, light], 1)
        self._decide(mean, light, turn)
        return mean, x  # each method's rest in the place of what it was given

    def _start_anew(self, x: Tensor, turn: Turn) -> None:
        """Forget the tensors whose learning rate has fallen to half of its highest since the last time."""
        now = x.new_tensor(turn.units or [0.0] * len(x))
        lowest = turn.state.get("units", now)
        fell = (now >= 2 * lowest) & (lowest > 0)
        follow = fell | (lowest == 0) | ((now > 0) & (now < lowest))
        turn.state["units"] = torch.where(follow, now, lowest)
        if "light" in turn.state:
            turn.state |= {
                "light": turn.state["light"] | fell,
                "count": turn.state["count"].masked_fill(fell, 0),
                "total": turn.state["total"].masked_fill(fell[:, None, None], 0),
                "norm": turn.state["norm"].masked_fill(fell, -1.0),
            }

    def _part(
        self, x: Tensor, turn: Turn, rows: list[int], strong: bool, fresh: bool
    ) -> Generator[Message, Any, tuple[Tensor, Tensor]]:
        """Some of the tensors by one of the methods, whose state is kept under names of its own."""
        method, prefix = (self.high, "high.") if strong else (self.low, "low.")
        known = {key.removeprefix(prefix): s for key, s in turn.state.items() if key.startswith(prefix)}
        state = {} if fresh else {key: s[rows] for key, s in known.items()}
        part = replace(turn, names=tuple(turn.names[i] for i in rows), state=state)
        mean, rest = yield from method.compress(x if method.matrix else x.flatten(1), part)
        for key, s in part.state.items():
            whole = known[key].clone() if key in known else s.new_zeros(len(turn.names), *s.shape[1:])
            whole[rows] = s
            turn.state[prefix + key] = whole
        return mean.to(x.dtype).view_as(x), torch.zeros_like(x) if rest is None else rest.view_as(x)

    def _decide(self, mean: Tensor, light: Tensor, turn: Turn) -> None:
        """At a period's end: what the next one is to be."""
        total = turn.state.get("total", torch.zeros_like(mean)) + mean
        count = turn.state.get("count", torch.zeros_like(light, dtype=torch.int32)) + 1
        norm = total.flatten(1).norm(dim=1)
        before = turn.state.get("norm", torch.full_like(norm, -1.0))
        moved = ~((norm - before).abs() < self.change * before)  # also where none is known, which is −1
        over = count >= self.every
        turn.state.update(
            light=torch.where(over, moved, light),
            count=count.masked_fill(over, 0),
            norm=torch.where(over, norm, before),
            total=total.masked_fill(over[:, None, None], 0),
        )
