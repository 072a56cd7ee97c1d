"""Signum (Bernstein et al., 2018): signs with momentum; EF-signSGD (Karimireddy et al., 2019): signs with error feedback."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import MessageGenerator, StepContext
from .bits import pack, signs
from .sign import SignSGD
from .twostage import TwoStage


@dataclass(frozen=True)
class Signum(SignSGD):
    """m = β·m + (1 − β)·g on each worker, then the majority of the signs of m, as in `SignSGD`.

    The optimizer's own momentum must be off, and the learning rate as small as for `SignSGD`.

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

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        m = ctx.state.get("m")
        ctx.state["m"] = g * (1 - self.momentum) if m is None else m.lerp(g, 1 - self.momentum)
        return super().compress(ctx.state["m"], ctx)  # it is only read


@dataclass(frozen=True)
class EFSignSGD(TwoStage):
    """Sends ‖p‖₁/d · sgn(p): one bit per element and one number per tensor; the rest is kept as error feedback.

    Signs are sent to the owner of each shard (all-to-all), which averages them and sends the signs and the mean magnitude of
    its shard to all (all-gather). The error of this second quantization is kept at the owner. A zero counts as +.

    >>> EFSignSGD()
    EFSignSGD()
    """

    def encode(self, p: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        size = torch.abs(p, out=spare).sum((1, 2), keepdim=True) / max(n, 1)
        plus = torch.ge(p, 0, out=ctx.empty(p.shape, torch.bool))
        return pack(plus, 1), size.expand(-1, p.shape[1], -1)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return signs(sent[0], out, sent[1])
