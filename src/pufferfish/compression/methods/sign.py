"""signSGD with majority vote (Bernstein et al., 2018): one bit per element, in both directions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import StepContext
from .bits import pack, signs
from .twostage import TwoStage


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

    def encode(self, x: Tensor, n: int, spare: Tensor, ctx: StepContext) -> tuple[Tensor, ...]:
        """Signs of the gradients; and, at the owner, of the mean vote."""
        compare = torch.ge if ctx.step % 2 == 0 else torch.gt
        return (pack(compare(x, 0, out=ctx.empty(x.shape, torch.bool)), 1),)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return signs(sent[0], out)
