"""`SimulatedDDP`: the training steps of several DDP workers with compressed gradients, computed in one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import Meter, Settings, Simulated
from ...compression.ddp_hook import checked_settings, gradient_units
from ...compression.state import updates_by_rate
from ...layers.names import own_name
from ...lowrank.optimizers import Optimizers, as_list

Loss = Callable[..., Tensor | Iterable[Tensor]]


class SimulatedDDP:
    """Simulates `size` workers under DistributedDataParallel and `compress` with one model in one process.

    The workers hold the same parameters, so one model is enough: each worker runs forward and backward on its own part
    of the batch, and their gradients go through the real engine. Buffers, such as BatchNorm's statistics, are those
    of worker 0, which DDP broadcasts. Two workers are bit-identical to real ones; with three or more, sums may differ in
    the last bit (see `Simulated`).

    Args:
        model: not wrapped. Every parameter that requires a gradient must get one in every pass.
        settings: as in `compress`.
        size: number of workers.
        optimizer: as in `compress`: under SGD, error feedback follows the learning rate.
        seeds: one per worker, for random layers such as dropout; None: all workers use the global generators.

    >>> from pufferfish.compression import Settings, TopK
    >>> model = nn.Linear(2, 1, bias=False)
    >>> four = SimulatedDDP(model, Settings(TopK(k=1), smallest=0), 4)
    >>> four.backward(lambda x: model(x).sum(), [(torch.tensor([4.0, i]),) for i in range(4)])
    >>> model.weight.grad
    tensor([[4., 0.]])
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        size: int,
        *,
        optimizer: Optimizers = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        self.model, self.size, self.optimizers = model, size, as_list(optimizer)
        self._by_rate = [o for o in self.optimizers if updates_by_rate(o)]
        self.generators = None
        if seeds is not None:
            self.generators = WorkerGenerators(seeds, next(model.parameters()).device)
        # the same checks as for real workers
        checked_settings(settings, self._params(), self.optimizers)
        self.simulated = Simulated(settings, size)

    @property
    def meter(self) -> Meter:
        """Bytes that one worker has sent so far."""
        return self.simulated.meter

    def backward(self, loss: Loss, parts: Sequence[tuple[Any, ...]]) -> None:
        """Run the backward pass of all workers on `loss(*part)`; the mean of their gradients replaces every `p.grad`."""
        self.average(self.gradients(loss, parts))

    def gradients(self, loss: Loss, parts: Sequence[tuple[Any, ...]]) -> list[dict[str, Tensor]]:
        """Return each worker's gradients by parameter name. Does not synchronize the device.

        `loss` may also yield the losses of several passes, whose gradients are summed as under DDP's `no_sync`.
        """
        if len(parts) != self.size:
            raise ValueError(f"the batch is in {len(parts)} parts, but there are {self.size} workers")
        params = self._params()
        buffers = list(self.model.buffers())
        before = [b.clone() for b in buffers]
        gradients = []
        for worker in reversed(range(self.size)):  # worker 0 last: its buffers stay
            for b, x in zip(buffers, before, strict=True):
                b.copy_(x)
            with self.generators.use(worker) if self.generators else nullcontext():
                losses = loss(*parts[worker])
                gradients.append(_sum_gradients([losses] if isinstance(losses, Tensor) else losses, params))
        return gradients[::-1]

    @torch.no_grad()
    def average(self, gradients: Sequence[dict[str, Tensor]]) -> None:
        """Exchange the workers' gradients; their mean replaces every `p.grad`."""
        params = self._params()
        names = {id(p): name for name, p in params.items()}
        means = self.simulated.average(gradients, *gradient_units(names, self._by_rate))[0]
        # In the parameters' memory formats, as under DDP.
        grads = [torch.empty_like(p) if p.grad is None else p.grad for p in params.values()]
        torch._foreach_copy_(grads, [means[name] for name in params])
        for p, g in zip(params.values(), grads, strict=True):
            p.grad = g

    def state_dict(self) -> dict[str, Any]:
        """State of the compression of all workers."""
        return self.simulated.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.simulated.load_state_dict(state)

    def _params(self) -> dict[str, nn.Parameter]:
        return {own_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}


class WorkerGenerators:
    """Random number generators of each worker, on the host and on the GPU.

    Args:
        device: of the model.

    >>> generators = WorkerGenerators([7, 8], torch.device("cpu"))
    >>> with generators.use(1):
    ...     drawn = torch.rand(2)
    >>> torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(8)))
    True
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        self._host = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._device = [torch.Generator(gpu).manual_seed(s).get_state() for gpu in self._gpus for s in seeds]

    @contextmanager
    def use(self, worker: int) -> Iterator[None]:
        """Make the worker's generators the default ones."""
        with torch.random.fork_rng(self._gpus):
            torch.set_rng_state(self._host[worker])
            for gpu in self._gpus:
                torch.cuda.set_rng_state(self._device[worker], gpu)
            try:
                yield
            finally:
                self._host[worker] = torch.get_rng_state()
                for gpu in self._gpus:
                    self._device[worker] = torch.cuda.get_rng_state(gpu)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        return {"host": list(self._host), "device": list(self._device)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of all generators."""
        self._host = list(state["host"])
        if len(state["device"]) == len(self._device):
            self._device = list(state["device"])


def _sum_gradients(losses: Iterable[Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum the gradients of all losses, in order."""
    total: list[Tensor] = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, tuple(params.values()))
        if total:
            torch._foreach_add_(total, gradients)
        else:
            total = list(gradients)
    return dict(zip(params, total, strict=True))
