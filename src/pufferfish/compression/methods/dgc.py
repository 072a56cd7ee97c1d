"""Deep Gradient Compression (Lin et al., 2018): top-k of accumulated gradients with momentum correction."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import MessageGenerator, Method, StepContext, check_whole
from .sparse import gather_sparse, largest_indices


@dataclass(frozen=True)
class DGC(Method):
    """u = m·u + g, v = v + u; the largest of v are sent, and v and u become zero there.

    v accumulates gradients with momentum; zeroing u stops the momentum of the elements just sent. The optimizer's own
    momentum must be off. Tensors that are sent uncompressed (1-D and small ones) get no momentum here. As in the paper, u
    and v are sums of gradients: when the learning rate falls, accumulated ones are applied with the lower rate. Gradients are not clipped before they are accumulated.

    Args:
        sparsity: Share of elements that is not sent. Higher → fewer bytes.
        momentum: m.
        warm_up: Steps of each stage of lower sparsity at the start: 75 %, 93.75 %, 98.44 %, 99.6 %, that is 1 − 4^-i in
            stage i, as long as that is below `sparsity`. 0: no such stages.

    >>> [round(DGC(warm_up=100).sparsity_at(step), 4) for step in (0, 99, 100, 399, 400)]
    [0.75, 0.75, 0.9375, 0.9961, 0.999]
    """

    sparsity: float = 0.999
    momentum: float = 0.9
    warm_up: int = 0

    sparse = True
    exchanges = ("all_gather",)
    kind = "own"
    has_momentum = True
    in_scale = ("u", "v")

    def __post_init__(self) -> None:
        for name in ("sparsity", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"DGC: {name}={getattr(self, name)!r} is not in [0, 1)")
        check_whole(self, "warm_up", least=0)

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        return state.get("v")

    def sparsity_at(self, step: int) -> float:
        """Share of elements that is not sent in this step."""
        if self.warm_up == 0:
            return self.sparsity
        return min(self.sparsity, 1 - 0.25 ** min(step // self.warm_up + 1, 26))

    def compress(self, g: Tensor, ctx: StepContext) -> MessageGenerator:
        u, v = (ctx.state.get(key) for key in "uv")
        u = g.clone() if u is None else torch.add(g, u, alpha=self.momentum)
        v = u.clone() if v is None else v + u
        d = g.shape[1]
        k = max(1, d - round(self.sparsity_at(ctx.step) * d))
        i, _ = largest_indices(v, k, 1, ctx)
        mean, _ = yield from gather_sparse(v, i, v.view(-1)[i], ctx)
        u.view(-1).index_add_(0, i, u.view(-1)[i], alpha=-1)
        ctx.state.update(u=u, v=v)
        return mean, None
