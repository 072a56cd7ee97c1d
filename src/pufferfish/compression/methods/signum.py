"""Signs with momentum (Signum, Bernstein et al., 2018) and signs with memories (EF-signSGD, Karimireddy et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Steps
from ..turn import Turn
from .bits import pack, signs
from .sign import SignSGD
from .twostage import TwoStage


@dataclass(frozen=True)
class Signum(SignSGD):
    """m = β·m + (1 − β)·g on each worker; then the majority of the signs of m, as `SignSGD` does.

    The optimizer's own momentum must be off, and the learning rate is one for signs.

    Args:
        momentum: β.

    >>> Signum()
    Signum(momentum=0.9)
    """

    momentum: float = 0.9

    has_momentum = True
    in_scale = ("m",)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Signum: momentum={self.momentum!r} is not in [0, 1)")

    def compress(self, g: Tensor, turn: Turn) -> Steps:
        m = turn.state.get("m")
        turn.state["m"] = g * (1 - self.momentum) if m is None else m.lerp(g, 1 - self.momentum)
        return super().compress(turn.state["m"], turn)  # which only reads it


@dataclass(frozen=True)
class EFSignSGD(TwoStage):
    """‖p‖₁/d · sgn(p): one bit an element and one number a tensor; the rest waits in the memory.

    Signs go to the owner of each shard (all-to-all), which averages them and sends the signs and the mean size of its
    shard to all (all-gather). What that loses waits in a second memory, at the owner. A zero counts as +.

    >>> EFSignSGD()
    EFSignSGD()
    """

    def encode(self, p: Tensor, n: int, spare: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        size = torch.abs(p, out=spare).sum((1, 2), keepdim=True) / max(n, 1)
        plus = torch.ge(p, 0, out=turn.empty(p.shape, torch.bool))
        return pack(plus, 1), size.expand(-1, p.shape[1], -1)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return signs(sent[0], out, sent[1])
