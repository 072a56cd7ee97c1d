"""One training step: batches, forward and backward passes, exchange, clipping, the optimizer."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import Settings, compress
from ...local.local_steps import LocalSteps
from ..model_change import ModelChange
from ..tasks import Batch, Task
from .narrow import build_model
from .optimizers import SAM, build_optimizer
from .settings import RunSettings
from .workers import move_to_device


class Replica(NamedTuple):
    """Model and optimizer of one worker."""

    module: nn.Module
    optimizer: Any


@dataclass
class RunComponents:
    """Everything that a run trains with.

    Args:
        model: wrapped by DDP if there are several processes.
        module: the model without wrappers.
        optimizer: of torch, or an `OptimizerList`.
        hook: compresses gradients between processes, or the `LocalSteps` of this worker, or None.
        worker: number of this worker, from 0.
        world_size: real or simulated workers.
        replicas: models and optimizers of the other simulated workers, if they have their own.
    """

    task: Task
    settings: RunSettings
    data: Any
    model: Any
    module: nn.Module
    optimizer: Any
    hook: Any
    worker: int
    world_size: int
    device: torch.device
    replicas: list[Replica] = field(default_factory=list)


def build_components(
    task: Task,
    settings: RunSettings,
    data: Any,
    worker: int,
    processes: int,
    device: torch.device,
    module: nn.Module | None = None,
) -> RunComponents:
    """Build the run's model, the recipe's optimizer, and how workers exchange what they learn: DDP or local steps.

    Args:
        module: a model to use instead of the run's.
    """
    torch.manual_seed(settings.seed)
    method, replicas = settings.method, []
    if method.local is not None and settings.simulate:
        replicas = [_replica(task, settings, device, None) for _ in range(settings.simulate - 1)]
        torch.manual_seed(settings.seed)
    module, optimizer = _replica(task, settings, device, module)
    world_size = settings.simulate or processes
    if method.compress is not None and method.compress.has_momentum and world_size > 1:
        _remove_momentum(optimizer)
    model: Any = DistributedDataParallel(module) if processes > 1 and method.local is None else module
    hook: Any = None
    if method.local is not None and not settings.simulate:
        hook = method.local.build()
    elif method.compress is not None and processes > 1:
        compression = Settings(scope=method.scope, hierarchy=method.hierarchy)
        hook = compress(model, method.compress, optimizer=optimizer, settings=compression)
    return RunComponents(
        task,
        settings,
        data,
        model,
        module,
        optimizer,
        hook,
        worker,
        world_size,
        device,
        replicas,
    )


def _remove_momentum(optimizer: Any) -> None:
    """Switch off the momentum of matrices and filters, for compression with momentum of its own; vectors are sent uncompressed."""
    for group in optimizer.param_groups:
        if group.get("momentum") and any(p.dim() > 1 for p in group["params"]):
            group |= {"momentum": 0.0, "nesterov": False}


def _replica(task: Task, settings: RunSettings, device: torch.device, module: nn.Module | None) -> Replica:
    module = move_to_device(module or build_model(task, settings.narrow), device)
    return Replica(module, build_optimizer(module, settings.recipe))


class StepRunner:
    """Runs one update after the other.

    `state_dict` holds the tensors that a task passes from batch to batch, such as the state of an LSTM.

    Attributes:
        model: as updates call it, compiled if the settings ask for it.
    """

    def __init__(self, components: RunComponents) -> None:
        self.components = components
        self.workers = [components.worker]  # those that compute in this process
        self._carried: list[Tensor] = []
        self._restored: list[Tensor] = []  # carried tensors of a checkpoint, for the next batch
        self.model_changed()

    def model_changed(self) -> None:
        """Compile the model anew after its layers were replaced."""
        c = self.components
        self.model: Any = c.model
        if c.settings.compile:
            # CUDA graphs keep the gradients of one backward pass only, and are captured again for other shapes.
            passes = c.world_size * c.settings.accumulate + isinstance(c.optimizer, SAM)
            graphs = c.device.type == "cuda" and passes == 1 and c.task.static_shapes
            self.model = torch.compile(c.model, mode="reduce-overhead" if graphs else None)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a worker has sent in local steps so far."""
        return 0.0

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for averages of local steps so far."""
        return 0.0

    def sync(self) -> None:
        """Make the models of all workers equal, if they have different ones."""

    def resumed(self, change: ModelChange) -> None:
        """Call it after a checkpoint was restored, with the change of the model."""

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Use the batches of an epoch, from its update `start` on."""
        self._batches = [self._epoch_batches(epoch, start, worker) for worker in self.workers]
        if not start:
            self._restored = []

    def update(self, lr: float) -> Tensor:
        """Train on the next batch; return the loss of the first worker here, without synchronizing the device."""
        for group in self.components.optimizer.param_groups:
            group["lr"] = lr
        return self._update(*self._next_batches())

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that are carried to the next batch."""
        return {"carried": [x.clone() for x in self._carried]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that are carried to the next batch."""
        self._restored = list(state["carried"])

    def _epoch_batches(self, epoch: int, start: int, worker: int) -> Iterator[Batch]:
        c, passes = self.components, self.components.settings.accumulate
        generator = torch.Generator().manual_seed(_epoch_seed(c.settings.seed, epoch))
        return c.task.batches(
            c.data, "train", c.settings.recipe.batch // passes, device=c.device, generator=generator,
            worker=worker, world_size=c.world_size, start=start * passes,
        )  # fmt: skip

    def _next_batches(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of an update's batches, by worker and pass, and the carried tensors by worker."""
        inputs: list[Tensor] = []
        carries = self.components.task.carried_tensors
        self._carried = []
        for batches in self._batches:
            for i in range(self.components.settings.accumulate):
                batch = next(batches)
                inputs += batch[: len(batch) - carries]
                self._carried += batch[len(batch) - carries :] if i == 0 else ()  # all passes share them
        for x, saved in zip(self._carried, self._restored, strict=False):
            x.copy_(saved)
        self._restored = []
        return inputs, self._carried

    def _worker_batches(
        self, worker: int, inputs: Sequence[Tensor], carried: Sequence[Tensor]
    ) -> list[Batch]:
        """Return one worker's batches out of the tensors of `_next_batches`."""
        workers, passes = len(self.workers), self.components.settings.accumulate
        width, carries = len(inputs) // (workers * passes), len(carried) // workers
        own = carried[worker * carries : (worker + 1) * carries]
        first = worker * passes
        return [(*inputs[i * width : (i + 1) * width], *own) for i in range(first, first + passes)]

    def _update(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> Tensor:
        """Run an update on given batches."""
        batches, optimizer = self._worker_batches(0, inputs, carried), self.components.optimizer
        if isinstance(optimizer, SAM):
            before = [x.clone() for x in carried]
            with self._no_sync():
                loss = self._backward(batches)
            for x, old in zip(carried, before, strict=True):
                x.copy_(old)
            with optimizer.perturbed(self.components.module):
                self._backward(batches)
        else:
            loss = self._backward(batches)
        self._optimizer_step()
        return loss

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward and backward passes on all batches; return their mean loss."""
        total = torch.zeros((), device=self.components.device)
        for i, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if i == len(batches) else self._no_sync():
                loss = self._loss(batch) / len(batches)
                loss.backward()
            total += loss.detach()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        c = self.components
        with c.settings.autocast:
            return c.task.loss(self.model, batch, c.settings.recipe)

    def _no_sync(self) -> Any:
        model = self.components.model
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def _optimizer_step(self) -> None:
        c = self.components
        if c.settings.recipe.clip is not None:
            nn.utils.clip_grad_norm_(c.module.parameters(), c.settings.recipe.clip)
        c.optimizer.step()
        c.optimizer.zero_grad()


def _epoch_seed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")


class LocalStepRunner(StepRunner):
    """Runs the updates of one worker, followed by its local steps, which are `components.hook`. Create it on all workers."""

    def __init__(self, components: RunComponents) -> None:
        assert isinstance(components.hook, LocalSteps)
        self.local = components.hook
        super().__init__(components)

    @property
    def wire_bytes(self) -> float:
        return self.local.applied_bytes

    @property
    def waited(self) -> float:
        return self.local.waited

    def model_changed(self) -> None:
        super().model_changed()
        self.local.start(self.components.module)

    def update(self, lr: float) -> Tensor:
        loss = super().update(lr)
        self.local.step(self.components.module)
        return loss

    def sync(self) -> None:
        self.local.sync(self.components.module)
