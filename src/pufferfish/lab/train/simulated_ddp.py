"""`SimulatedDDP`: one process that computes what several DDP workers with compressed gradients would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...compression import Aggregator, Hook, Meter, Simulated
from ...compression.ddp_hook import units
from ...compression.settings import Methods
from ...distributed.workers import Workers
from ...layers.names import own_name
from ...optim.carry import Optimizers

Loss = Callable[..., Tensor | Iterable[Tensor]]


class SimulatedDDP:
    """What `size` workers under DistributedDataParallel and `compress` do to a model, by one model in one process.

    The workers hold the same parameters, so they take turns with them: each runs forward and backward on its own part
    of the batch, and their gradients go through the real aggregator. Buffers, such as BatchNorm's statistics, are rank
    0's: that is what DDP broadcasts. Two workers give the very bits of real ones; with three or more, sums differ in the
    last bit (see `Simulated`).

    Args:
        model: not wrapped. All its parameters that need a gradient must get one in every pass.
        method: as in `compress`.
        size: how many workers.
        optimizer, scaler: as in `compress`: under SGD a memory follows the learning rate, and the loss scale.
        seeds: each worker's, for what layers draw at random (dropout); None: all draw from the global generators.
        memory, scope, seed, smallest, nonfinite: as in `Aggregator`.

    >>> from pufferfish.compression import TopK
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
        scaler: Any = None,
        seeds: Sequence[int] | None = None,
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
        device = next(model.parameters()).device
        self.model, self.size = model, size
        self.streams = None if seeds is None else Streams(seeds, device)
        self.hook = Hook(model, Workers(None, device, "simulated workers"), aggregator, optimizer, scaler)
        self.hook.use(method, memory)  # refuses what it refuses real workers

    @property
    def meter(self) -> Meter:
        """What one worker sent so far."""
        return self.hook.meter

    def backward(self, loss: Loss, parts: Sequence[tuple[Any, ...]]) -> None:
        """One backward pass of all: `loss(*part)` for each worker's part; the mean replaces every `p.grad`."""
        self.average(self.gradients(loss, parts))

    def gradients(self, loss: Loss, parts: Sequence[tuple[Any, ...]]) -> list[dict[str, Tensor]]:
        """Each worker's own, by parameter name. Nothing here waits for the device: a CUDA graph may hold it.

        `loss` may also yield the losses of several passes, whose gradients add up, as under DDP's `no_sync`.
        """
        if len(parts) != self.size:
            raise ValueError(f"the batch is in {len(parts)} parts, but there are {self.size} workers")
        params = self._params()
        buffers = list(self.model.buffers())
        before = [b.clone() for b in buffers]
        found = []
        for worker in reversed(range(self.size)):  # rank 0 last: what it leaves in the buffers stays
            for b, x in zip(buffers, before, strict=True):
                b.copy_(x)
            with self.streams.of(worker) if self.streams else nullcontext():
                told = loss(*parts[worker])
                found.append(_summed([told] if isinstance(told, Tensor) else told, params))
        return found[::-1]

    @torch.no_grad()
    def average(self, gradients: Sequence[dict[str, Tensor]]) -> None:
        """The exchange: the workers' mean into every `p.grad`."""
        params = self._params()
        scale = 1.0 if self.hook.scaler is None else float(self.hook.scaler.get_scale())
        rates = units({id(p): name for name, p in params.items()}, self.hook.optimizers, scale)
        means = self.hook.aggregator.together(gradients, rates, scale)[0]
        # In the parameters' layouts, as DDP's are.
        grads = [torch.empty_like(p) if p.grad is None else p.grad for p in params.values()]
        torch._foreach_copy_(grads, [means[name] for name in params])
        for p, g in zip(params.values(), grads, strict=True):
            p.grad = g

    def _params(self) -> dict[str, nn.Parameter]:
        return {own_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}


class Streams:
    """Each worker's random numbers: what layers draw inside of `of(worker)` comes from its own generators.

    >>> streams = Streams([7, 8], torch.device("cpu"))
    >>> with streams.of(1):
    ...     drawn = torch.rand(2)
    >>> torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(8)))
    True
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._host = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._default: Any = None
        self.generators: list[Any] = []  # on a GPU, which graphs that draw from them must know
        if device.type == "cuda":
            self._default = torch.cuda.default_generators[device.index or 0]
            for seed in seeds:
                self.generators.append(self._default.clone_state())
                self.generators[-1].manual_seed(seed)

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """While worker `worker` computes."""
        host = torch.get_rng_state()
        torch.set_rng_state(self._host[worker])
        if self._default is not None:
            own = self._default.graphsafe_get_state()
            self._default.graphsafe_set_state(self.generators[worker])
        try:
            yield
        finally:
            if self._default is not None:
                self._default.graphsafe_set_state(own)
            self._host[worker] = torch.get_rng_state()
            torch.set_rng_state(host)

    def state_dict(self) -> dict[str, Any]:
        """Where they are."""
        return {"host": list(self._host), "device": [g.get_state() for g in self.generators]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._host = list(state["host"])
        for generator, there in zip(self.generators, state["device"], strict=False):
            generator.set_state(there)


def _summed(losses: Iterable[Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all passes, added up in their order."""
    total: list[Tensor] = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, tuple(params.values()))
        if total:
            torch._foreach_add_(total, gradients)
        else:
            total = list(gradients)
    return dict(zip(params, total, strict=True))
