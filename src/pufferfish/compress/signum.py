"""Signs with momentum (Signum, Bernstein et al., 2018) and signs with memories (EF-signSGD, Karimireddy et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, unpack
from .method import Gather, Method, Scatter, Steps
from .sign import SignSGD
from .turn import Turn


@dataclass(frozen=True)
class Signum(Method):
    """m = β·m + (1 − β)·g on each worker; then the majority of the signs of m, as `SignSGD` does.

    The optimizer's own momentum must be off, and the learning rate is one for signs.

    Args:
        momentum: β.

    >>> Signum()
    Signum(momentum=0.9)
    """

    momentum: float = 0.9

    kind = "vote"
    has_momentum = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Signum: momentum={self.momentum!r} is not in [0, 1)")

    def compress(self, g: Tensor, turn: Turn) -> Steps:
        m = turn.state.get("m", torch.zeros_like(g)).lerp(g, 1 - self.momentum)
        turn.state["m"] = m
        return (yield from SignSGD().compress(m, turn))


@dataclass(frozen=True)
class EFSignSGD(Method):
    """‖p‖₁/d · sgn(p): one bit an element and one number a tensor; the rest waits in the memory.

    Signs go to the owner of each shard (all-to-all), which averages them and sends the signs and the mean size of its
    shard to all (all-gather). What that loses waits in a second memory, at the owner. A zero counts as +.

    >>> EFSignSGD()
    EFSignSGD()
    """

    def compress(self, p: Tensor, turn: Turn) -> Steps:
        size = p.abs().mean(1, keepdim=True)
        votes = pack(turn.shards(p >= 0, multiple=8), 1)
        received = yield Scatter(tuple((v, size) for v in votes))
        filled = turn.shards(torch.ones_like(p), multiple=8)[turn.rank]  # 1, and 0 behind the tensor's end
        mean = torch.stack([_signs(unpack(v, 1), theirs) for v, theirs in received]).mean(0) * filled
        mean += turn.state.get("owner", 0)
        plus, here = mean >= 0, mean.abs().sum(1, keepdim=True) / filled.sum(1, keepdim=True).clamp_min(1)
        turn.state["owner"] = (mean - _signs(plus, here)) * filled
        averages = yield Gather((pack(plus, 1), here))
        applied = turn.whole([_signs(unpack(v, 1), theirs) for v, theirs in averages], p.shape[1])
        return applied, p - _signs(p >= 0, size)


def _signs(plus: Tensor, size: Tensor) -> Tensor:
    return torch.where(plus.bool(), size, -size)
