"""signSGD with majority vote (Bernstein et al., 2018): one bit an element, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..turn import Turn
from .bits import pack, signs
from .twostage import TwoStage


@dataclass(frozen=True)
class SignSGD(TwoStage):
    """Each worker votes + or − for every element, and all apply the majority's ±1.

    Votes go to the owner of each shard (all-to-all), the verdicts to all (all-gather). One bit has no zero: a
    zero votes + in even steps and − in odd ones, and so do ties end, so that neither drifts.

    The result says nothing about sizes: use a learning rate of its own, far smaller than SGD's.

    >>> SignSGD()
    SignSGD()
    """

    kind = "vote"

    def encode(self, x: Tensor, n: int, spare: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Of votes, and of their mean: a verdict is its sign."""
        compare = torch.ge if turn.step % 2 == 0 else torch.gt
        return (pack(compare(x, 0, out=turn.empty(x.shape, torch.bool)), 1),)

    def decode(self, sent: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return signs(sent[0], out)
