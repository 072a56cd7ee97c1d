"""`SimulatedDDP`: one process that computes what several DDP workers with compressed gradients would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..compress import Aggregator, Hook, Meter, Simulated
from ..compress.hook import units
from ..compress.table import Methods
from ..names import own_name
from ..optim import Optimizers
from ..ranks import Workers


class SimulatedDDP:
    """What `size` workers under DistributedDataParallel and `compress` do to a model, by one model in one process.

    The workers hold the same parameters, so they take turns with them: each runs forward and backward on its own part
    of the batch, and their gradients go through the real aggregator. Buffers, such as BatchNorm's statistics, are rank
    0's: that is what DDP broadcasts. Two workers give the very bits of real ones; with three or more, sums differ in the
    last bit (see `Simulated`). Layers that draw random numbers take them from one generator, where real workers
    have one each.

    Args:
        model: not wrapped. All its parameters that need a gradient must get one in every pass.
        method: as in `compress`.
        size: how many workers.
        optimizer: as in `compress`: under SGD a memory follows the learning rate.
        memory, scope, seed, smallest, nonfinite: as in `Aggregator`.

    >>> from pufferfish.compress import TopK
    >>> model = nn.Linear(2, 1, bias=False)
    >>> four = SimulatedDDP(model, TopK(k=1), 4, smallest=0)
    >>> four.backward(lambda x: model(x).sum(), [(torch.tensor([4.0, i]),) for i in range(4)])
    >>> model.weight.grad
    tensor([[4., 0.]])
    """

    def __init__(
        self,
        model: nn.Module,
        method: Methods,
        size: int,
        *,
        optimizer: Optimizers = None,
        memory: bool | None = None,
        scope: Literal["layer", "global"] = "layer",
        seed: int = 0,
        smallest: int = 1024,
        nonfinite: Literal["nan", "zero"] = "nan",
    ) -> None:
        aggregator = Aggregator(
            method, Simulated(size),
            memory=memory, scope=scope, seed=seed, smallest=smallest, nonfinite=nonfinite,
        )  # fmt: skip
        alone = Workers(None, next(model.parameters()).device, "simulated workers")
        self.model, self.size = model, size
        self.hook = Hook(model, alone, aggregator, optimizer, None)
        self.hook.use(method, memory)  # refuses what it refuses real workers

    @property
    def meter(self) -> Meter:
        """What one worker sent so far."""
        return self.hook.meter

    def backward(self, loss: Callable[..., Tensor], parts: Sequence[tuple[Any, ...]]) -> None:
        """One backward pass of all: `loss(*part)` for each worker's part; the mean replaces every `p.grad`."""
        self.average(self.gradients(loss, parts))

    def gradients(
        self, loss: Callable[..., Tensor], parts: Sequence[tuple[Any, ...]]
    ) -> list[dict[str, Tensor]]:
        """Each worker's own, by parameter name. Nothing here waits for the device: a CUDA graph may hold it."""
        if len(parts) != self.size:
            raise ValueError(f"the batch is in {len(parts)} parts, but there are {self.size} workers")
        params = self._params()
        buffers = list(self.model.buffers())
        before = [b.clone() for b in buffers]
        found = []
        for part in reversed(parts):  # rank 0 last: what it leaves in the buffers stays
            for b, x in zip(buffers, before, strict=True):
                b.copy_(x)
            gradients = torch.autograd.grad(loss(*part), tuple(params.values()))
            found.append(dict(zip(params, gradients, strict=True)))
        return found[::-1]

    @torch.no_grad()
    def average(self, gradients: Sequence[dict[str, Tensor]]) -> None:
        """The exchange: the workers' mean into every `p.grad`."""
        params = self._params()
        rates = units({id(p): name for name, p in params.items()}, self.hook.optimizers)
        means = self.hook.aggregator.together(gradients, rates)[0]
        # In the parameters' layouts, as DDP's are.
        grads = [torch.empty_like(p) if p.grad is None else p.grad for p in params.values()]
        torch._foreach_copy_(grads, [means[name] for name in params])
        for p, g in zip(params.values(), grads, strict=True):
            p.grad = g

    def _params(self) -> dict[str, nn.Parameter]:
        return {own_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}
