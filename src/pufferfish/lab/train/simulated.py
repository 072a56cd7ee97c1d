"""Several workers in one process, exactly: `SimulatedDDP` for gradients, `SimulatedLocalSteps` for local steps, and their runners."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.files import load_model_state, model_state
from ...compression import Meter, Settings, Simulated
from ...compression.ddp_hook import checked_settings, gradient_units
from ...compression.state import updates_by_rate
from ...layers.names import own_name, trainable_parameters
from ...local.fragments import Anchor, Means, move_engine_states, settings_for, split_by_depth
from ...local.local_steps import all_finite, averaged_buffers, check_model
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


_SAVED = ("since", "means", "remaining", "sent_bytes")


@dataclass
class _Fragment:
    """A fragment of all models: its engines, one for each worker, and the average on its way."""

    names: list[str]
    engines: Simulated
    since: int = 0  # number of updates since it was sent
    means: Means | None = None  # on their way
    remaining: int = 0  # number of updates until they are applied
    sent_bytes: float = 0.0  # on the wire, by one worker, in its last average


class SimulatedLocalSteps:
    """`LocalSteps` of `size` workers that compute one after the other in this process, each with a model of its own.

    All workers have the same anchor and outer optimizer, so there is one of each. Methods and state are those of `LocalSteps`,
    with the models of all workers instead of one. Two workers are bit-identical to real ones; with three or more, sums
    may differ in the last bit (see `Simulated`).

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
        self.size, self.schedule, self.settings = size, method.schedule, method.settings
        self.applied_bytes = 0.0  # on the wire, by one worker, of the averages applied so far
        self.lost = 0  # number of averages discarded because they were not finite
        self._make_outer = method.outer
        self._phase = 0
        self._anchor: Anchor | None = None
        self._fragments: list[_Fragment] = []
        self._resumed: Mapping[str, Any] | None = None

    @torch.no_grad()
    def start(self, models: Sequence[nn.Module]) -> None:
        """Set the anchor, and give all models the parameters and buffers of the first, unless state was loaded."""
        first, resumed = models[0], self._resumed
        check_model(first, None)
        params = trainable_parameters(first)
        self.settings.check_patterns(params)
        anchor = Anchor(self._make_outer, params, self.settings, self._anchor)
        device = next(iter(params.values())).device
        if resumed is None:
            for model in models[1:]:
                model.load_state_dict(first.state_dict())
            anchor.fill(params, averaged_buffers(first), device)
        else:
            anchor.fill(resumed["anchor"], resumed["buffers"], device)
            anchor.load_outer_state(resumed["outer"])
        self._make_fragments(first, anchor, resumed["fragments"] if resumed else None)
        self._anchor, self._resumed = anchor, None

    @torch.no_grad()
    def step(self, models: Sequence[nn.Module]) -> bool:
        """Count one update of all models and average what is due; whether an average was applied."""
        if self._resumed is not None:
            self.start(models)
        self._phase = (self._phase + 1) % self.schedule.h
        landing = []
        for fragment in self._fragments:
            fragment.since += 1
            if fragment.means is not None:
                fragment.remaining -= 1
                landing += [fragment] if fragment.remaining == 0 else []
        due = [self._fragments[p] for p in self.schedule.due(self._phase)]
        tensors = [self._tensors(model) for model in models]
        self._send(due, tensors)
        self._land(landing if self.schedule.delay else due, tensors)
        return bool(landing) or bool(due and not self.schedule.delay)

    @torch.no_grad()
    def sync(self, models: Sequence[nn.Module]) -> bool:
        """Average now. Returns False if there was no update since the last average."""
        if self._resumed is not None:
            self.start(models)
        tensors = [self._tensors(model) for model in models]
        flying = [fragment for fragment in self._fragments if fragment.means is not None]
        self._land(flying, tensors)
        changed = [fragment for fragment in self._fragments if fragment.since]
        self._send(changed, tensors)
        self._land(changed, tensors)
        self._phase = 0
        return bool(flying or changed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by parameter name."""
        if self._resumed is not None:
            return dict(self._resumed)
        assert self._anchor is not None
        fragments = [
            {"names": f.names, "engines": f.engines.state_dict(), **{key: getattr(f, key) for key in _SAVED}}
            for f in self._fragments
        ]
        return {"phase": self._phase, "lost": self.lost, "fragments": fragments} | self._anchor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; it takes effect at the next `step` or `sync`."""
        self._resumed = copy.deepcopy(dict(state))
        self._phase, self.lost = state["phase"], state["lost"]

    def _make_fragments(
        self, model: nn.Module, anchor: Anchor, saved: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Divide the model. Error feedback goes along with tensors that move to another fragment."""
        shapes = {name: x.shape for name, x in anchor.tensors().items()}
        if saved is not None:
            split = [f["names"] for f in saved]
        else:
            sizes = {
                n: x.numel() for n, x in {**trainable_parameters(model), **averaged_buffers(model)}.items()
            }
            split = split_by_depth(sizes, self.schedule.fragments)
        before, self._fragments = self._fragments, []
        for i, names in enumerate(split):
            engines = Simulated(settings_for(names, self.settings, anchor.buffers), self.size)
            self._fragments.append(_Fragment(list(names), engines))
            if saved is not None:
                engines.load_state_dict(saved[i]["engines"])
                for key in _SAVED:
                    setattr(self._fragments[-1], key, saved[i][key])
            elif before:
                mine = {name: shapes[name] for name in names}
                for worker, engine in enumerate(engines.engines):
                    states = [f.engines.engines[worker].state_dict() for f in before]
                    engine.load_state_dict(move_engine_states(states, mine))

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        assert self._anchor is not None
        buffers = {name: b for name, b in model.named_buffers() if name in self._anchor.buffers}
        return {**trainable_parameters(model), **buffers}

    def _send(self, fragments: Sequence[_Fragment], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Average fragments of all models. The means are applied by `_land`."""
        assert self._anchor is not None
        for fragment in fragments:
            differences = [self._anchor.differences(fragment.names, own) for own in tensors]
            before = fragment.engines.meter.wire_bytes
            fragment.means = fragment.engines.average(differences)[0]
            fragment.sent_bytes = fragment.engines.meter.wire_bytes - before
            fragment.since, fragment.remaining = 0, self.schedule.delay

    def _land(self, fragments: Sequence[_Fragment], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Update the anchor by the means of some fragments, and all models by the anchor."""
        assert self._anchor is not None
        lost = False
        for fragment in fragments:
            self.applied_bytes += fragment.sent_bytes
            means, fragment.means = fragment.means, None
            assert means is not None
            if not all_finite(means.values()):
                lost = True
                continue
            self._anchor.step(means)
            mixing = self.schedule.mixing if fragment.since else 0.0
            for own in tensors:
                self._anchor.copy_to(fragment.names, own, mixing)
        if lost:
            self.lost += 1
            warnings.warn(
                "local steps: the model of a worker is not finite; all workers return to the last averaged model",
                RuntimeWarning,
                stacklevel=2,
            )
            for fragment in self._fragments:
                if fragment.means is not None and not all_finite(fragment.means.values()):
                    fragment.means = None
                fragment.since = 0
            for own in tensors:
                self._anchor.copy_to(own, own)
