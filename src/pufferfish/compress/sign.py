"""signSGD with majority vote (Bernstein et al., 2018): one bit an element, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, unpack
from .method import Gather, Method, Scatter, Steps
from .turn import Turn


@dataclass(frozen=True)
class SignSGD(Method):
    """Each worker votes + or − for every element, and all apply the majority's ±1.

    Votes go to the owner of each shard (all-to-all), the verdicts to all (all-gather). One bit has no zero: a
    zero votes + in even steps and − in odd ones, and so do ties end, so that neither drifts.

    The result says nothing about sizes: use a learning rate of its own, far smaller than SGD's.

    >>> SignSGD()
    SignSGD()
    """

    kind = "vote"

    def compress(self, x: Tensor, turn: Turn) -> Steps:
        even = turn.step % 2 == 0
        votes = pack(turn.shards(x >= 0 if even else x > 0, multiple=8), 1)
        ballots = yield Scatter(tuple((v,) for v in votes))
        yes = torch.stack([unpack(v, 1) for (v,) in ballots]).sum(0, dtype=torch.int16)
        verdict = 2 * yes >= turn.size if even else 2 * yes > turn.size
        verdicts = yield Gather((pack(verdict, 1),))
        positive = turn.whole([unpack(v, 1) for (v,) in verdicts], x.shape[1])
        return positive.to(x.dtype).mul_(2).sub_(1), None
