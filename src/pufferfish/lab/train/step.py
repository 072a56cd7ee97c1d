"""One training step: forward and backward passes, exchange, clipping, the optimizer.

`update` is the step, in `train` by a `StepRunner`, which gives it the batches of an epoch, and in `bench` and `advise` by a
`TimedModel`. `connect` says how workers exchange what they learn: DDP, with or without compression, or local steps.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import Settings, compress
from ...local.local_steps import LocalSteps
from ..method_name import TrainingMethod
from ..model_change import ModelChange
from ..tasks import Batch, Task
from .optimizers import SAM, build_optimizer
from .settings import RunSettings, build_model
from .workers import move_to_device

#: Of a model and a batch.
Loss = Callable[[Any, Any], Tensor]


def update(
    model: Any,
    optimizer: Any,
    loss: Loss,
    batches: Sequence[Any],
    *,
    clip: float | None = None,
    carried: Sequence[Tensor] = (),
) -> Tensor:
    """Train on the batches of one update, one for each pass; return their mean loss, without synchronizing the device.

    Args:
        model: as forward passes call it: in DDP, or compiled.
        clip: maximum norm of the gradients.
        carried: tensors that the passes change for the next update, such as the state of an LSTM.
    """
    if isinstance(optimizer, SAM):
        before = [x.clone() for x in carried]
        with without_exchange(model):
            mean = _backward(model, loss, batches)
        for x, old in zip(carried, before, strict=True):
            x.copy_(old)
        with optimizer.perturbed(model):
            _backward(model, loss, batches)
    else:
        mean = _backward(model, loss, batches)
    finish_update(model, optimizer, clip)
    return mean


def _backward(model: Any, loss: Loss, batches: Sequence[Any]) -> Tensor:
    """Run forward and backward passes on all batches; return their mean loss. DDP exchanges gradients in the last one."""
    losses = []
    for i, batch in enumerate(batches, start=1):
        with contextlib.nullcontext() if i == len(batches) else without_exchange(model):
            one = loss(model, batch) / len(batches)
            one.backward()
        losses.append(one.detach())
    return sum(losses[1:], losses[0])


def finish_update(model: Any, optimizer: Any, clip: float | None) -> None:
    """Update the parameters from their gradients."""
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def without_exchange(model: Any) -> Any:
    """A context in which DDP leaves the gradients of this worker as they are."""
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def connect(method: TrainingMethod, module: nn.Module, optimizer: Any, size: int) -> tuple[Any, Any]:
    """Connect this worker with the others of a job of `size`; call it on all workers.

    Returns:
        The model as forward passes call it, and the hook of its compression, its `LocalSteps`, or None.
    """
    if method.local is not None:
        return module, method.local.build()
    if size == 1:
        return module, None
    model = DistributedDataParallel(module)
    if method.compress is None:
        return model, None
    settings = Settings(scope=method.scope, hierarchy=method.hierarchy)
    return model, compress(model, method.compress, optimizer=optimizer, settings=settings)


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
    model, hook = (module, None) if settings.simulate else connect(method, module, optimizer, processes)
    return RunComponents(
        task, settings, data, model, module, optimizer, hook, worker, world_size, device, replicas
    )  # fmt: skip


def _remove_momentum(optimizer: Any) -> None:
    """Switch off the momentum of matrices and filters, for compression with momentum of its own; vectors are sent uncompressed."""
    for group in optimizer.param_groups:
        if group.get("momentum") and any(p.dim() > 1 for p in group["params"]):
            group |= {"momentum": 0.0, "nesterov": False}


def _replica(task: Task, settings: RunSettings, device: torch.device, module: nn.Module | None) -> Replica:
    module = move_to_device(module or build_model(task, settings.narrow), device)
    return Replica(module, build_optimizer(module, settings.recipe))


class StepRunner:
    """Runs one update after the other on the batches of an epoch, and the local steps of this worker.

    `state_dict` holds the tensors that a task passes from batch to batch, such as the state of an LSTM.

    Attributes:
        model: as updates call it, compiled if the settings ask for it.
    """

    def __init__(self, components: RunComponents) -> None:
        self.components = components
        self.local = components.hook if isinstance(components.hook, LocalSteps) else None
        self.workers = [components.worker]  # those that compute in this process
        self._carried: list[Tensor] = []
        self._restored: list[Tensor] = []  # carried tensors of a checkpoint, for the next batch
        self.model_changed()

    def model_changed(self) -> None:
        """Compile the model anew after its layers were replaced; local steps start from its weights."""
        c = self.components
        self.model: Any = c.model
        if c.settings.compile:
            # CUDA graphs keep the gradients of one backward pass only, and are captured again for other shapes.
            passes = c.world_size * c.settings.accumulate + isinstance(c.optimizer, SAM)
            graphs = c.device.type == "cuda" and passes == 1 and c.task.static_shapes
            self.model = torch.compile(c.model, mode="reduce-overhead" if graphs else None)
        if self.local is not None:
            self.local.start(c.module)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a worker has sent in local steps so far."""
        return 0.0 if self.local is None else self.local.applied_bytes

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for averages of local steps so far."""
        return 0.0 if self.local is None else self.local.waited

    def sync(self) -> None:
        """Make the models of all workers equal, if they have different ones."""
        if self.local is not None:
            self.local.sync(self.components.module)

    def resumed(self, change: ModelChange) -> None:
        """Call it after a checkpoint was restored, with the change of the model."""

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Use the batches of an epoch, from its update `start` on."""
        c, passes = self.components, self.components.settings.accumulate
        seed = int.from_bytes(hashlib.sha256(f"{c.settings.seed} {epoch}".encode()).digest()[:7], "big")
        self._batches = [
            c.task.batches(
                c.data, "train", c.settings.recipe.batch // passes, device=c.device,
                generator=torch.Generator().manual_seed(seed), worker=worker, world_size=c.world_size,
                start=start * passes,
            )
            for worker in self.workers
        ]  # fmt: skip
        if not start:
            self._restored = []

    def update(self, lr: float) -> Tensor:
        """Train on the next batch; return the loss of the first worker here, without synchronizing the device."""
        for group in self.components.optimizer.param_groups:
            group["lr"] = lr
        loss = self._update(self._next_batches())
        if self.local is not None:
            self.local.step(self.components.module)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that are carried to the next batch."""
        return {"carried": [x.clone() for x in self._carried]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that are carried to the next batch."""
        self._restored = list(state["carried"])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The training loss of a batch."""
        c = self.components
        with c.settings.autocast:
            return c.task.loss(model, batch, c.settings.recipe)

    def _next_batches(self) -> list[list[Batch]]:
        """The batches of the next update, by worker and pass. All passes of a worker share its carried tensors."""
        carries = self.components.task.carried_tensors
        found, self._carried = [], []
        for batches in self._batches:
            passes = [next(batches) for _ in range(self.components.settings.accumulate)]
            width = len(passes[0]) - carries
            carried = passes[0][width:]
            self._carried += carried
            found.append([(*batch[:width], *carried) for batch in passes])
        for x, saved in zip(self._carried, self._restored, strict=False):
            x.copy_(saved)
        self._restored = []
        return found

    def _update(self, batches: Sequence[Sequence[Batch]]) -> Tensor:
        c = self.components
        clip = c.settings.recipe.clip
        return update(self.model, c.optimizer, self.loss, batches[0], clip=clip, carried=self._carried)


def worker_seed(seed: int, worker: int) -> int:
    """Seed of a worker's random numbers during training; dropout differs between workers.

    >>> worker_seed(0, 1)
    2000
    """
    return seed + 1000 * (worker + 1)
