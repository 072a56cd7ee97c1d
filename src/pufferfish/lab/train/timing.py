"""`TimedModel`: a model that is trained with one method, a step at a time, and timed in turn with others; and predicted steps."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compression import DDPHook
from ...layers.names import trainable_parameters
from ...local.local_steps import LocalSteps
from ...lowrank.factorize import reshape_
from ...measure import Breakdown, CostModel, Link, Prediction, Work, dry_run
from ...measure.breakdown import pause
from ...measure.cost_model import built_buckets, measure_compute, with_ddp_messages, with_local_exchange
from ...planning import Plan
from ..method_name import TrainingMethod
from ..network import LinkShape
from ..network.network import LATENCY
from ..report.formatting import format_seconds
from ..tasks import Batch
from .console import Console
from .optimizers import build_optimizer
from .record import TrainingLog
from .step import RunComponents, connect, update


class TimedModel:
    """A model that is trained with one method, a step at a time. Create it on all workers.

    Args:
        model: the model, without wrappers.
        transform: changes the model (in DDP, if there are several workers) and the optimizer to what a run has at its
            end: a low-rank or a pruned model.
        clip: maximum norm of the gradients.
    """

    def __init__(
        self,
        method: TrainingMethod,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Any],
        loss: Callable[[nn.Module], Tensor],
        transform: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        clip: float | None = None,
    ) -> None:
        self.method, self.inner, self.loss, self.clip = method, model, loss, clip
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = next(model.parameters()).device
        self.optimizer = optimizer(model)
        self.model, hook = connect(method, model, self.optimizer, self.size)
        self.ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        self.hook = hook if isinstance(hook, DDPHook) else None
        if transform is not None:
            transform(self.model, self.optimizer)
        self.local = hook if isinstance(hook, LocalSteps) else None
        if self.local is not None:
            self.local.start(model)

    @property
    def period(self) -> int:
        """Number of steps after which all of them recur: 1, or a round of local steps."""
        return 1 if self.method.local is None else self.method.local.h

    def step(self, exchange: bool = True) -> None:
        """Make one update; without `exchange`, from the gradients of this worker only."""
        with self._gradient_sync(exchange):
            update(self.model, self.optimizer, lambda model, batch: self.loss(model), [None], clip=self.clip)
        if exchange and self.local is not None:
            self.local.step(self.inner)

    def time_parts(self, steps: int, exchange: bool = True) -> dict[str, float]:
        """Mean seconds of a step, as "step", and of its parts (see `Breakdown`)."""
        breakdown = Breakdown(self.model, self.optimizer)
        seconds = self.seconds(steps, exchange, breakdown)
        parts, waited = breakdown.parts, self._waited / steps  # which the breakdown counts as data
        return parts | {
            "data": parts["data"] - waited, "exchange": parts["exchange"] + waited, "step": seconds
        }  # fmt: skip

    def seconds(
        self, steps: int = 1, exchange: bool = True, breakdown: AbstractContextManager[object] | None = None
    ) -> float:
        """Mean seconds of a step. All workers start and end at the same time; `breakdown` is active meanwhile."""
        waited = self._wait()
        self._barrier()
        start = time.perf_counter()
        with breakdown or contextlib.nullcontext():
            for _ in range(steps):
                self.step(exchange)
            self._barrier()
            seconds = (time.perf_counter() - start) / steps
        self._waited = 0.0 if self.local is None else self.local.waited - waited
        self._wait()  # messages on their way must not meet those of other models
        return seconds

    def _wait(self) -> float:
        """Wait for averages of local steps on their way; return the seconds of waiting for averages so far."""
        if self.local is None:
            return 0.0
        self.local.wait()
        return self.local.waited

    def compute_seconds(self) -> float:
        """Seconds of one step of this worker without the exchange; all workers start at the same time."""
        self._barrier()
        pause()
        start = time.perf_counter()
        self.step(exchange=False)
        self._synchronize()
        return time.perf_counter() - start

    def traffic(self) -> tuple[float, int]:
        """Bytes on the wire and messages of a step of this worker; plain DDP is counted as a ring all-reduce."""
        if self.local is not None:
            meter, fragments = self.local.meter, self.local.schedule.fragments
            a_round = fragments / max(meter.steps, 1)  # of the meter's steps, one for each fragment
            return meter.wire_bytes * a_round / self.period, round(meter.messages * a_round / self.period)
        if self.ddp is None:
            return 0.0, 0
        if self.hook is not None:
            meter = self.hook.meter
            return meter.wire_bytes / max(meter.steps, 1), round(meter.messages / max(meter.steps, 1))
        sizes = built_buckets(self.ddp)
        return 2 * (self.size - 1) / self.size * sum(sizes), len(sizes)

    @contextlib.contextmanager
    def _gradient_sync(self, exchange: bool) -> Iterator[None]:
        if self.ddp is None:
            yield
            return
        # DDP decides at the end of a pass whether the next one broadcasts buffers; here steps are independent.
        self.ddp.require_forward_param_sync = exchange
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            yield

    def _barrier(self) -> None:
        self._synchronize()
        if self.size > 1:
            dist.barrier()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


#: Steps of each model before the timing: DDP rebuilds its buckets, caches fill.
WARM_UP_STEPS = 2
#: The steps of a model in a round take about this many seconds, but are not more than this many. Local steps: whole rounds.
ROUND_SECONDS, MAX_STEPS = 0.3, 50

Round = dict[str, dict[str, Any]]  # by method


def steps_per_round(models: Mapping[str, TimedModel]) -> dict[str, int]:
    """Warm up all models and return how many steps of each are timed in a round; the same on all workers."""
    seconds = {}
    for _ in range(WARM_UP_STEPS):
        for name, model in models.items():
            seconds[name] = model.time_parts(1)["step"]
            if model.size > 1:
                model.time_parts(1, exchange=False)
    counts = {name: min(MAX_STEPS, max(1, round(ROUND_SECONDS / s))) for name, s in seconds.items()}
    steps = torch.tensor(
        [math.ceil(n / models[name].period) * models[name].period for name, n in counts.items()]
    )
    if dist.is_initialized():
        steps = steps.to(next(iter(models.values())).device)
        dist.broadcast(steps, 0)
    return dict(zip(models, steps.tolist(), strict=True))


def timing_rounds(
    models: Mapping[str, TimedModel], count: int, steps: Mapping[str, int], first: int = 0
) -> Iterator[Round]:
    """Time all models in each round, in rotating order, with and without the exchange.

    Args:
        steps: steps of each model in a round, from `steps_per_round`.
        first: number of the first round, which determines the order.

    Yields:
        By method: "seconds" of a step, its "parts", "bytes" and "messages", and for several workers
        "compute_seconds", a step without the exchange.
    """
    for number in range(first, first + count):
        timings: Round = {}
        for name in _order(models, number):
            model = models[name]
            parts = model.time_parts(steps[name])
            timing = timings[name] = {"seconds": parts.pop("step"), "parts": parts}
            timing["bytes"], timing["messages"] = model.traffic()
            if model.size > 1:
                timing["compute_seconds"] = model.time_parts(steps[name], exchange=False)["step"]
        yield {name: timings[name] for name in models}


def step_times(models: Mapping[str, TimedModel], steps: Mapping[str, int], number: int) -> dict[str, float]:
    """Seconds of a step of each model in one round.

    Args:
        steps: steps of each model in the round, from `steps_per_round`.
        number: of the round, which determines the order.
    """
    times = {name: models[name].seconds(steps[name]) for name in _order(models, number)}
    return {name: times[name] for name in models}


def _order(models: Mapping[str, TimedModel], number: int) -> list[str]:
    names = list(models)
    return names[number % len(names) :] + names[: number % len(names)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([2.0])
    ([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def speedups(rounds: Sequence[Round], name: str, against: str) -> list[float]:
    """Speedup of a method over another, in each round that has both.

    >>> speedups([{"a": {"seconds": 3.0}, "b": {"seconds": 1.5}}, {"a": {"seconds": 1.0}}], "b", "a")
    [2.0]
    """
    return [r[against]["seconds"] / r[name]["seconds"] for r in rounds if name in r and against in r]


def random_low_rank_(model: nn.Module, plan: Plan) -> nn.Module:
    """Give a model the low-rank structure of a plan, in place, without an SVD: random factors take as much time.

    >>> from pufferfish.planning import plan
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> random_low_rank_(model, plan(model, 0.25))(torch.ones(1, 64)).isfinite().all()
    tensor(True)
    """
    reshape_(model, plan)
    for p in model.parameters():
        if torch.isnan(p.detach()).any():
            nn.init.normal_(p, std=0.02)
    return model


def log_predicted_step(components: RunComponents, log: TrainingLog, console: Console, step: int) -> float:
    """Predict a step of the current model, log it at update `step`, and return its seconds.

    An earlier prediction, for the model before the switch, stays in run.json as "warm_up_seconds_a_step".
    """
    network = components.settings.network
    prediction = predict_step(components, LinkShape.parse(network))
    earlier = log.data["predicted"].get("seconds_a_step")
    log.predict(
        seconds_a_step=prediction.step,
        utilisation=prediction.utilisation,
        **({"warm_up_seconds_a_step": earlier} if earlier else {}),
    )
    log.log(step=step, **{"predicted/step": prediction.step, "predicted/exchange": prediction.exchange})
    console.info(
        f"predicted, not measured: {format_seconds(prediction.step)} per step with {components.world_size} workers on {network}, "
        f"{format_seconds(prediction.exchange)} of it waiting for the exchange"
    )
    return prediction.step


def predict_step(components: RunComponents, link: LinkShape) -> Prediction:
    """Predict a step of one of the run's workers on such links; leaves the model and random state unchanged."""
    work = _with_exchange(_measure_work(components), components)
    bandwidth, latency = 1e6 * link.mbit, 1e-3 * link.delay_ms + LATENCY
    model = CostModel(link=Link.nominal(bandwidth=bandwidth, latency=latency, size=components.world_size))
    return model.predict(work.accumulated(components.settings.accumulate))


def _measure_work(components: RunComponents) -> Work:
    """Measure a forward and backward pass of one worker and an update, on a copy of the model."""
    task, settings = components.task, components.settings
    devices = [components.device] if components.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model = copy.deepcopy(components.module).train()
        optimizer = build_optimizer(model, settings.recipe)
        batch = next(
            task.batches(
                components.data, "train", settings.recipe.batch // settings.accumulate, device=components.device,
                generator=torch.Generator().manual_seed(0), world_size=components.world_size,
            )
        )  # fmt: skip

        def loss(net: Any, batch: Batch) -> Tensor:
            with settings.autocast:
                return task.loss(net, batch, settings.recipe)

        def step() -> None:
            update(model, optimizer, loss, [batch])

        return measure_compute(model, step, optimizer)


def _with_exchange(work: Work, components: RunComponents) -> Work:
    """Add the messages of the run's compression, and the time to encode and decode them."""
    parameters = trainable_parameters(components.module)
    method, local = components.settings.method.compress, components.settings.method.local
    if local is not None:
        size = components.world_size
        return with_local_exchange(work, local.schedule, local.settings, parameters, size)
    if method is None:
        return with_ddp_messages(work, parameters)
    return replace(work, **vars(dry_run(method, parameters, components.world_size)))
