"""One bit for each element: votes, signs of a momentum, and signs with error feedback.

signSGD with majority vote and Signum are Bernstein et al., 2018; EF-signSGD is Karimireddy et al., 2019; 1-bit SGD is
Seide et al., 2014.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..method import Gather, Kept, MessageGenerator, Method, StepContext
from .quantized import TwoStage, pack, signs, unpack


@dataclass(frozen=True)
class SignSGD(TwoStage):
    """Each worker votes + or − for every element, and all apply the majority's ±1.

    Votes are sent to the owner of each shard (all-to-all), the results to all (all-gather). One bit has no zero: a zero
    counts as + in even steps and as − in odd ones, and so does a tie, so that neither drifts.

    The result has no magnitude: use a learning rate much smaller than SGD's.

    >>> SignSGD()
    SignSGD()
    """

    kind = "vote"
    state: ClassVar = {}

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        """Signs of the gradients; and, at the owner, of the mean vote."""
        compare = torch.ge if ctx.step % 2 == 0 else torch.gt
        return (pack(compare(x, 0, out=ctx.empty(x.shape, torch.bool)), 1),)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return signs(sent[0], out)


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
    state: ClassVar = {"m": Kept(follows="loss scale")}

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


@dataclass(frozen=True)
class OneBitSGD(Method):
    """Replaces the elements ≥ 0 of each column by their mean, and those below 0 by theirs; signs and means are all-gathered.

    A matrix of one or two rows, where two numbers per column save nothing, is sent uncompressed.

    >>> OneBitSGD().fits((64, 3, 3, 3)), OneBitSGD().fits((2, 100))
    (True, False)
    """

    layout = "matrices"
    exchanges = ("all_gather",)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[0] > 2  # two numbers per column

    def compress(self, M: Tensor, ctx: StepContext) -> MessageGenerator:
        m, n = M.shape[1:]
        spare = ctx.empty(M.shape, M.dtype)
        positive = M >= 0
        many = positive.sum(1, keepdim=True)
        above = torch.clamp(M, min=0, out=spare).sum(1, keepdim=True) / many.clamp_min(1)
        below = torch.clamp(M, max=0, out=spare).sum(1, keepdim=True) / (m - many).clamp_min(1)
        packed = pack(pad(positive.flatten(1), (0, -m * n % 8)), 1)
        M -= _decoded(packed, above, below, spare)
        everyone = yield Gather((packed, above, below))
        mean = ctx.empty(M.shape, M.dtype).zero_()
        for theirs, a, b in everyone:
            mean += _decoded(theirs, a, b, spare)
        return mean.div_(ctx.size), M


def _decoded(packed: Tensor, above: Tensor, below: Tensor, out: Tensor) -> Tensor:
    bits = unpack(packed, 1)[:, : out[0].numel()].view(out.shape)
    return out.copy_(bits).mul_(above - below).add_(below)  # faster than `where`
