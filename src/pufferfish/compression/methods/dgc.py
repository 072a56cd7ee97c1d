"""Deep Gradient Compression (Lin et al., 2018): top-k of gradients that gathered momentum while they waited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Method, Steps
from ..turn import Turn
from .sparse import check_sample, gathered, largest


@dataclass(frozen=True)
class DGC(Method):
    """u = m·u + g, v = v + u; the largest of v are sent, and v and u become zero there.

    v is a memory that momentum flows into; zeroing u stops the momentum of what was just sent. The optimizer's own
    momentum must be off. Tensors that travel as they are (1-D and small ones) get no momentum from here. As in the paper u
    and v are sums of gradients: when the learning rate falls, what waited comes out with the lower one.

    Args:
        sparsity: the share of elements that is not sent. Higher → fewer bytes.
        momentum: m.
        clip: each worker's g is scaled down to the norm clip·W^-½ for W workers, where it is longer; None: never.
            It is the norm of each tensor, with scope="global" of all of them.
        warm_up: steps for each stage of lower sparsity at the start: 75 %, 93.75 %, 98.44 %, 99.6 %, that is
            1 − 4^-i in stage i, as long as that is below `sparsity`. 0: none.
        sample: as in `TopK`: below 1 the largest are found faster, by and large.

    >>> [round(DGC(warm_up=100).sparsity_at(step), 4) for step in (0, 99, 100, 399, 400)]
    [0.75, 0.75, 0.9375, 0.9961, 0.999]
    """

    sparsity: float = 0.999
    momentum: float = 0.9
    clip: float | None = None
    warm_up: int = 0
    sample: float = 1.0

    sparse = True
    exchanges = ("all_gather",)
    kind = "own"
    has_momentum = True
    in_scale = ("u", "v")

    def __post_init__(self) -> None:
        for name in ("sparsity", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"DGC: {name}={getattr(self, name)!r} is not in [0, 1)")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"DGC: clip={self.clip!r} is neither None nor a finite number > 0")
        if isinstance(self.warm_up, bool) or not isinstance(self.warm_up, int) or self.warm_up < 0:
            raise ValueError(f"DGC: warm_up={self.warm_up!r} is not a whole number of steps ≥ 0")
        check_sample("DGC", self.sample)

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, rank: int, size: int) -> Tensor | None:
        return state.get("v")

    def sparsity_at(self, step: int) -> float:
        """The share that is not sent in this step."""
        if self.warm_up == 0:
            return self.sparsity
        return min(self.sparsity, 1 - 0.25 ** min(step // self.warm_up + 1, 26))

    def compress(self, g: Tensor, turn: Turn) -> Steps:
        if self.clip is not None:
            norm = g.norm(dim=1, keepdim=True).clamp_min(1e-30)
            g *= (self.clip * turn.size**-0.5 / norm).clamp_max(1)
        u, v = (turn.state.get(key) for key in "uv")
        u = g.clone() if u is None else torch.add(g, u, alpha=self.momentum)
        v = u.clone() if v is None else v + u
        d = g.shape[1]
        k = max(1, d - round(self.sparsity_at(turn.step) * d))
        i, used = largest(v, k, self.sample, turn)
        mean, _ = yield from gathered(v, i, v.view(-1)[i] * used, turn)
        u.view(-1).index_add_(0, i, u.view(-1)[i] * used, alpha=-1)
        turn.state.update(u=u, v=v)
        return mean, None
