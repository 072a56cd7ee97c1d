"""Several workers in one process, exactly: `SimulatedDDP` for gradients, `SimulatedLocalSteps` for local steps, and their runners."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint.files import load_model_state, model_state
from ...compression import Meter, Settings, Simulated
from ...compression.ddp_hook import checked_settings, gradient_units
from ...compression.exchange import Started, Transport, no_wait
from ...compression.state import updates_by_rate
from ...layers.names import own_name
from ...local.local_steps import LocalSteps
from ...lowrank.by_name import load_optimizer, names_by_id, optimizer_state
from ...lowrank.optimizers import Optimizers, as_list
from ..method_name import LocalMethod
from ..model_change import ModelChange
from ..tasks import Batch
from .step import RunComponents, StepRunner, finish_update, worker_seed


class SimulatedStepRunner(StepRunner):
    """Runs the updates of `components.world_size` DDP workers, each with its own batches, dropout and error feedback."""

    def __init__(self, components: RunComponents) -> None:
        settings = components.settings
        self.ddp = SimulatedDDP(
            components.module, settings.method.compression, components.world_size,
            optimizer=components.optimizer,
            seeds=[worker_seed(settings.seed, worker) for worker in range(components.world_size)],
        )  # fmt: skip
        super().__init__(components)
        self.workers = list(range(components.world_size))

    def state_dict(self) -> dict[str, Any]:
        assert self.ddp.generators is not None
        return super().state_dict() | {"streams": self.ddp.generators.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.ddp.generators is not None
        super().load_state_dict(state)
        self.ddp.generators.load_state_dict(state["streams"])

    def _update(self, batches: Sequence[Sequence[Batch]]) -> Tensor:
        total = torch.zeros((), device=self.components.device)  # of the first worker

        def losses(worker: int) -> Iterator[Tensor]:
            for batch in batches[worker]:
                loss = self.loss(self.model, batch) / len(batches[worker])
                if worker == 0:
                    total.add_(loss.detach())
                yield loss

        self.ddp.average(self.ddp.gradients(losses, [(worker,) for worker in self.workers]))
        c = self.components
        finish_update(c.module, c.optimizer, c.settings.recipe.clip)
        return total


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


class SimulatedLocalRunner(StepRunner):
    """Runs the updates of `components.world_size` workers, each with its own model, optimizer, batches and dropout.

    Every worker is a `StepRunner`, as it is in a process of its own. `state_dict` has the models and optimizers of all
    workers but the first, whose are `components.module` and `components.optimizer`.
    """

    def __init__(self, components: RunComponents) -> None:
        c, seed, size = components, components.settings.seed, components.world_size
        assert c.settings.method.local is not None
        self.components = components
        self.local = None  # of one worker
        self.steps = SimulatedLocalSteps(c.settings.method.local, size)
        self._generators = WorkerGenerators([worker_seed(seed, worker) for worker in range(size)], c.device)
        self._loaded: Mapping[str, Any] | None = None
        self.model_changed()

    def model_changed(self) -> None:
        """Compile the models anew, and start the local steps with the first worker's model."""
        c = self.components
        pairs = [(c.module, c.optimizer), *((r.module, r.optimizer) for r in c.replicas)]
        self._workers = [
            StepRunner(
                replace(c, model=module, module=module, optimizer=optimizer, worker=worker, replicas=[])
            )
            for worker, (module, optimizer) in enumerate(pairs)
        ]
        self.steps.start(self._models)

    @property
    def wire_bytes(self) -> float:
        return self.steps.applied_bytes

    def begin_epoch(self, epoch: int, start: int) -> None:
        for worker in self._workers:
            worker.begin_epoch(epoch, start)

    def update(self, lr: float) -> Tensor:
        """Train all workers on their next batches; return the loss of the first one."""
        losses = []
        for number, worker in enumerate(self._workers):
            with self._generators.use(number):
                losses.append(worker.update(lr))
        self.steps.step(self._models)
        return losses[0]

    def sync(self) -> None:
        self.steps.sync(self._models)

    def state_dict(self) -> dict[str, Any]:
        """Return the models and optimizers of the other workers, and all carried tensors and random generators."""
        return {
            "workers": [worker.state_dict() for worker in self._workers],
            "streams": self._generators.state_dict(),
            "replicas": [
                {
                    "model": model_state(r.module),
                    "optimizers": [optimizer_state(o, names_by_id(r.module)) for o in as_list(r.optimizer)],
                }
                for r in self.components.replicas
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Models follow in `resumed`, when all of them have the saved structure."""
        assert len(state["workers"]) == len(self._workers)  # check_same_run refuses another number
        self._loaded = state
        self._generators.load_state_dict(state["streams"])

    def resumed(self, change: ModelChange) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        for replica, saved in zip(self.components.replicas, state["replicas"], strict=True):
            change.restore_replica(replica.module, replica.optimizer)
            load_model_state(replica.module, saved["model"])
            names = names_by_id(replica.module)
            for optimizer, one in zip(as_list(replica.optimizer), saved["optimizers"], strict=True):
                load_optimizer(optimizer, names, one)
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.load_state_dict(saved)

    @property
    def _models(self) -> list[nn.Module]:
        return [worker.components.module for worker in self._workers]


class SimulatedLocalSteps:
    """`LocalSteps` of `size` workers in this process, each with its model, in a thread that meets the others in collectives.

    Two workers are bit-identical to real ones; with three or more, sums may differ in the last bit (see `Simulated`).

    >>> models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    >>> _ = nn.init.zeros_(models[0].weight)
    >>> local = SimulatedLocalSteps(LocalMethod(h=2, lr=1.0, momentum=0.0), size=2)
    >>> local.start(models)
    >>> for step in range(2):
    ...     for value, model in zip((1.0, 3.0), models):
    ...         _ = nn.init.constant_(model.weight, value)
    ...     averaged = local.step(models)
    >>> averaged, models[0].weight.tolist()
    (True, [[2.0, 2.0, 2.0, 2.0]])
    """

    def __init__(self, method: LocalMethod, size: int) -> None:
        self._meeting = threading.Barrier(size)
        box: list[Any] = [None] * size
        transports = [MeetingTransport(worker, box, self._meeting) for worker in range(size)]
        self.workers = [method.build(partial(_Worker, transport)) for transport in transports]
        self._loaded = False

    @property
    def applied_bytes(self) -> float:
        """Bytes on the wire, by one worker, of the averages applied so far."""
        return self.workers[0].applied_bytes

    @property
    def lost(self) -> int:
        """Number of averages discarded because they were not finite."""
        return self.workers[0].lost

    def start(self, models: Sequence[nn.Module]) -> None:
        """Set the anchors, and give all models the parameters and buffers of the first, unless state was loaded."""
        for model in () if self._loaded else models[1:]:
            model.load_state_dict(models[0].state_dict())
        self._on_all("start", models)

    def step(self, models: Sequence[nn.Module]) -> bool:
        """Count one update of all models and average what is due; whether an average was applied."""
        return bool(self._on_all("step", models))

    def sync(self, models: Sequence[nn.Module]) -> bool:
        """Average now. Returns False if there was no update since the last average."""
        return bool(self._on_all("sync", models))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the first worker, and what the others have of their own: the state of their fragments."""
        first, *others = [worker.state_dict() for worker in self.workers]
        return dict(first) | {"others": [state["fragments"] for state in others]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; it takes effect at the next `step` or `sync`."""
        self._loaded = True
        for worker, fragments in zip(self.workers, [state["fragments"], *state["others"]], strict=True):
            worker.load_state_dict(dict(state) | {"fragments": fragments})

    def _on_all(self, name: str, models: Sequence[nn.Module]) -> Any:
        """Call a method of all workers at once; return the result of the first."""

        def call(worker: LocalSteps, model: nn.Module) -> Any:
            try:
                return getattr(worker, name)(model)
            except BaseException:
                self._meeting.abort()  # the others would wait for this one
                raise

        with ThreadPoolExecutor(len(models)) as threads:
            results = list(threads.map(call, self.workers, models))
        self._loaded = False
        return results[0]


class _Worker(LocalSteps):
    def __init__(self, transport: Transport, *arguments: Any, **settings: Any) -> None:
        self._meeting = transport
        super().__init__(*arguments, **settings)

    def _connect(self, group: dist.ProcessGroup | None, delay: int) -> tuple[None, Transport]:
        return None, self._meeting


class MeetingTransport(Transport):
    """A worker's end of collectives in which threads wait for one another.

    Args:
        box: what each worker sends in the current collective.
    """

    def __init__(self, worker: int, box: list[Any], meeting: threading.Barrier) -> None:
        super().__init__()
        self.worker, self.size, self.box, self.meeting = worker, len(box), box, meeting

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        first, *others = self._meet(buffer.clone())
        buffer.copy_(first)
        for x in others:
            buffer += x
        return no_wait, buffer

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        return no_wait, self._meet(buffer.clone())

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        everyone = self._meet([x.clone() for x in pieces])
        return no_wait, [theirs[self.worker] for theirs in everyone]

    def _meet(self, sent: Any) -> list[Any]:
        self.box[self.worker] = sent
        self.meeting.wait()
        everyone = list(self.box)
        self.meeting.wait()  # nobody sends anew before all have read
        return everyone
