"""`advise`: measures the compute of a step of a `Workload`, predicts all training methods on a network, and can run the best ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression import NoCompression
from ...compression.method import Method
from ...distributed.workers import Workers
from ...layers.names import trainable_parameters
from ...measure import CostModel, Link, SpeedupEstimate, Work, probe
from ...measure.breakdown import trimmed_mean
from ...measure.cost_model import (
    COMPUTE_PARTS,
    measure_compute,
    probe_bytes,
    wire_bytes,
    with_compression,
    with_ddp_messages,
    with_local_exchange,
)
from ...measure.options import WARM_UP_FRACTION, OptionBuilder, TrainingOption, estimate, select_layers
from ...planning import Plan, plan
from ...planning.text import progress, track
from ..method_name import LOCAL_STEPS, TrainingMethod, training_method
from ..tasks import Batch, Task, find_task
from ..tasks.find_task import FileTask
from ..train.timing import TimedModel, random_low_rank_, step_times, steps_per_round
from .advice import (
    MAX_ROUNDS,
    MAX_SECONDS,
    MIN_ROUNDS,
    Advice,
    busy_reason,
    combine_rounds,
    combine_seconds,
    in_hierarchy,
    is_stable,
    simplicity,
)

#: Compression methods and local steps that are tried by default, the simplest first.
METHODS = ("bf16", "int8", "topk(0.01)", "powersgd(4)", *LOCAL_STEPS)
#: Fractions of the full rank for which the time of a low-rank step is shown.
RANK_RANGE = (0.125, 0.5)
_NOTE = "after a full-rank warm-up"
_LOCAL_NOTE = "local steps: compare the quality"
DENSE, LOW_RANK = "dense", "pufferfish"


def advise(
    workload: Workload,
    link: Link | None = None,
    *,
    network: str = "real",
    nodes: int,
    per_node: int = 1,
    methods: Sequence[str] = METHODS,
) -> Advice:
    """Estimate the speed of training methods on `nodes` machines of `per_node` workers. Call it on all workers of a job.

    Args:
        link: the link between the workers; None: that of this job, which is probed.
        network: name of the network, for the summary.
    """
    return _Advisor(workload, link, nodes, per_node, methods).advice(network)


def check(advice: Advice, workload: Workload, rounds: int = 5, best: int | None = 3) -> Advice:
    """Run dense training and the best methods in this job, with their warm-ups, and return advice by measured times.

    Args:
        rounds: least number of rounds in which the methods are timed, interleaved.
        best: how many methods to run; None: all.
    """
    candidates = advice.estimates if best is None else advice.top(best)
    names = dict.fromkeys(
        ["dense", *(name for e in candidates for name in (training_method(e.name).warm_up, e.name))]
    )
    models = {}
    for name in names:
        models[name] = build_timed_model(workload, training_method(name), advice.plans.get(name))
    workers, times = Workers.of_job("advise"), dict[str, list[float]]({name: [] for name in models})
    steps = steps_per_round(models)
    with progress("running the best methods", rounds) as advance:
        while True:
            seconds = step_times(models, steps, len(times[DENSE]))
            for name, mean in zip(seconds, workers.mean([*seconds.values()]), strict=True):
                times[name].append(mean)
            advance(1)
            count = len(times[DENSE])
            if count >= rounds:
                measured = advice.with_measurements(times)
                if workers.run_on_first(partial(bool, count >= MAX_ROUNDS or is_stable(measured.best))):
                    return measured


class _Advisor:
    """Measures the compute of a workload, and predicts the methods from it."""

    def __init__(
        self,
        workload: Workload,
        link: Link | None,
        nodes: int,
        per_node: int,
        methods: Sequence[str],
    ) -> None:
        self.workload, self.nodes, self.per_node = workload, nodes, per_node
        self.size = nodes * per_node
        parsed = {n: exchange_method(n) for n in methods}
        self.methods = {n: method.compress for n, method in parsed.items() if method.compress is not None}
        #: Every worker is a replica, so only for one worker on each machine.
        self.local = {n: m.local for n, m in parsed.items() if m.local is not None and per_node == 1}
        self.workers = Workers.of_job("advise")
        dense = build_timed_model(workload, training_method("dense"))
        self.model = dense.inner
        self.workers.run_on_all(self._check_loss)
        self.layer_times = self._measure_layers(workload.rank)
        link = link or probe(device=workload.device, largest=probe_bytes(self.model))
        self.costs = CostModel(link=link)
        # Models that are timed, and their work: dense, and low-rank by the hash of their plan.
        self.models: dict[str, TimedModel] = {DENSE: dense}
        with progress("measuring the dense model", None):
            self.works: dict[str, Work] = {DENSE: measured_work(dense)}
        self.seconds: dict[str, list[float]] = {DENSE: []}  # of a step without communication, in each round
        self._plan_by_hash: dict[str, Plan] = {}
        self._local_works: dict[tuple[str, str], Work] = {}  # by method and model
        self._use_work({})
        with progress("measuring compression", None):
            self.plans = self._select_plans()
        self._build_low_rank_models()

    def advice(self, network: str) -> Advice:
        """Repeat the measurements until the best estimate is stable, and return the medians."""
        rounds: list[list[SpeedupEstimate]] = []
        rank_seconds: list[dict[float, float]] = []
        start = time.monotonic()
        with progress("measuring steps", MIN_ROUNDS) as advance:
            while True:
                self._use_work({name: self._repeat(name) for name in self.models})
                rounds.append(self._estimates())
                rank_seconds.append(self._rank_seconds())
                advance(1)
                advice = self._advice_of(network, rounds, rank_seconds)
                late = time.monotonic() - start > MAX_SECONDS and len(rounds) >= 3
                done = late or (len(rounds) >= MIN_ROUNDS and is_stable(advice.best))
                if self.workers.run_on_first(partial(bool, done or len(rounds) == MAX_ROUNDS)):
                    return advice

    def _advice_of(
        self,
        network: str,
        rounds: Sequence[Sequence[SpeedupEstimate]],
        rank_seconds: Sequence[Mapping[float, float]],
    ) -> Advice:
        estimates = combine_rounds(rounds)
        compute = with_compute_seconds(self.works[DENSE], statistics.median(self.seconds[DENSE]))
        return Advice(
            workload=self.workload.name, network=network, nodes=self.nodes, per_node=self.per_node,
            link=self.costs.link, compute=compute, estimates=estimates,
            plans=self.plans, ceiling=estimates[0].step / compute_seconds(compute),
            rank_seconds=combine_seconds(rank_seconds, rounds),
            warm_up=self.workload.warm_up, rounds=len(rounds), rows=self.workload.rows, steps=self.workload.steps,
            busy=busy_reason(self.seconds[DENSE]) if len(rounds) > 1 else "",
        )  # fmt: skip

    def _repeat(self, name: str) -> float:
        """Time a few more steps of a model."""
        seconds = repeated_seconds(self.models[name], compute_seconds(self.works[name]))
        self.seconds[name].append(seconds)
        return seconds

    def _use_work(self, seconds: Mapping[str, float]) -> None:
        """Use the compute of one round for the next estimates: its seconds, by model."""
        works = {
            name: with_compute_seconds(work, seconds[name]) if name in seconds else work
            for name, work in self.works.items()
        }
        self.compute = works.pop(DENSE)
        self.dense = with_ddp_messages(self.compute, trainable_parameters(self.model))
        self._builder = OptionBuilder(self.model, self.dense, self.size, None, self.layer_times, _NOTE)
        self._builders = {
            key: OptionBuilder(self.model, self.dense, self.size, None, self._plan_by_hash[key], _NOTE, work)
            for key, work in works.items()
        }

    def _estimates(self) -> list[SpeedupEstimate]:
        step = self.costs.predict(self.dense, self.size).step
        hours = None if self.workload.steps is None else self.workload.steps * step / 3600
        dense = TrainingOption(kind="", name=DENSE, work=self.dense)
        estimates = [
            estimate(
                option_of_slowest(option), self.dense, self.costs, self.size, warm_up=self.workload.warm_up, hours=hours
            )
            for option in (dense, *self._options())
        ]  # fmt: skip
        return sorted(estimates, key=lambda e: simplicity(e.name))

    def _check_loss(self) -> None:
        """Raise ValueError for a loss that is not finite: compression skips such steps, which makes them faster."""
        loss = float(self.workload.forward(self.workload.build(), self.workload.batch()).detach())
        if not math.isfinite(loss):
            raise ValueError(
                f"{self.workload.name}: the loss of the untrained model is {loss}; it must be finite to be timed"
            )

    def _options(self) -> Iterator[TrainingOption]:
        """All methods but dense, under their names on the command line."""
        if LOW_RANK in self.plans:
            low_rank = self._builders[self.plans[LOW_RANK].hash].low_rank_option()
            yield replace(low_rank, kind="", name=LOW_RANK)
        for name, option in self._exchange_options().items():
            yield option
            both = f"{LOW_RANK}+{name}"
            if both in self.plans:
                yield replace(self._combined(self._builders[self.plans[both].hash], option), name=both)
        if 1 < self.per_node < self.size:
            yield from self._hierarchical_options()

    def _exchange_options(self) -> dict[str, TrainingOption]:
        """Compression and local steps of the dense model, by name."""
        if self.size == 1:
            return {}
        options = {
            n: replace(self._builder.compressed_option(method), kind="", name=n)
            for n, method in self.methods.items()
        }
        for name in self.local:
            work = self._local_work(name, DENSE, self.compute, self._builder.parameters)
            options[name] = TrainingOption(kind="", name=name, work=work, note=_LOCAL_NOTE)
        return options

    def _select_plans(self) -> dict[str, Plan]:
        """The layers that each low-rank method should change, by its name."""
        dense_bytes = max(1, sum(n for _, n in self.dense.messages))
        dense_wire = max(1.0, wire_bytes(self.dense, self.size))
        shares = {LOW_RANK: 1.0}
        for name, option in self._exchange_options().items():
            if name in self.local:
                share = wire_bytes(option.work, self.size) / dense_wire
            else:
                share = sum(n for _, n in option.work.messages) / dense_bytes
            shares[f"{LOW_RANK}+{name}"] = share
        plans = {
            name: select_layers(self.layer_times, self.dense, self.costs, self.size, share)
            for name, share in shares.items()
        }
        return {name: selected for name, selected in plans.items() if selected.ranks}

    def _hierarchical_options(self) -> Iterator[TrainingOption]:
        """The same methods and plans with a hierarchy of machines."""
        for name, method in {"dense": NoCompression(), **self.methods}.items():
            option = self._builder.compressed_option(method, per_node=self.per_node)
            yield replace(option, kind="", name=in_hierarchy(name))
            both = LOW_RANK if name == "dense" else f"{LOW_RANK}+{name}"
            if both in self.plans:
                self.plans[in_hierarchy(both)] = self.plans[both]
                combined = self._builders[self.plans[both].hash].combined_option(option, self.per_node)
                yield replace(combined, kind="", name=in_hierarchy(both))

    def _build_low_rank_models(self) -> None:
        """Build a model for each plan, and measure its work once."""
        self._rank_plans = self._plans_of_other_ranks()
        self._plan_by_hash = {p.hash: p for p in (*self.plans.values(), *self._rank_plans.values())}
        for key, selected in track(self._plan_by_hash.items(), "measuring low-rank models"):
            self.models[key] = build_timed_model(self.workload, training_method(LOW_RANK), selected)
            self.works[key], self.seconds[key] = measured_work(self.models[key]), []

    def _local_work(self, name: str, key: str, compute: Work, parameters: Mapping[str, Tensor]) -> Work:
        """The work of a model with local steps. Their dry runs are not repeated: averages are rare."""
        local, device = self.local[name], torch.device(self.workload.device)
        if (name, key) not in self._local_works:
            self._local_works[name, key] = with_local_exchange(
                compute, local.schedule, local.settings, parameters, self.size, device
            )
        return with_compute_seconds(self._local_works[name, key], compute_seconds(compute))

    def _combined(self, builder: OptionBuilder, compressed: TrainingOption) -> TrainingOption:
        if compressed.name in self.local:
            work = self._local_work(
                compressed.name, builder.plan.hash, builder.low_rank_work, builder.low_rank_parameters
            )
            return TrainingOption(
                kind="", name="", work=work, warm_up=compressed.work, note=f"{_NOTE}; {_LOCAL_NOTE}"
            )
        return replace(builder.combined_option(compressed), kind="")

    def _measure_layers(self, rank: float) -> Plan:
        """A plan with all layers that can be low-rank, and their times on worker 0, so that all workers decide alike."""
        batch = self.workload.batch()
        arguments: dict[str, Any] = {
            "keep": self.workload.keep,
            "example": lambda net: self.workload.forward(net, batch),
        }
        model = self.workload.build()

        def measure() -> str:
            ranks = plan(model, rank, measure=False, **arguments)
            times = plan(model, rank, measure="eager", **arguments)
            both = zip(ranks, times, strict=True)
            return ranks.replace(replace(e, ms=t.ms) for e, t in both).to_json()

        return Plan.from_json(self.workers.gather(measure)[0])

    def _plans_of_other_ranks(self) -> dict[float, Plan]:
        """The plan of low rank without compression, at the ranks of `RANK_RANGE`."""
        if LOW_RANK not in self.plans:
            return {}
        layers = [*self.plans[LOW_RANK].ranks]
        plans = {fraction: plan(self.model, fraction, only=layers) for fraction in RANK_RANGE}
        return {fraction: p for fraction, p in plans.items() if p.ranks}

    def _rank_seconds(self) -> dict[float, float]:
        seconds = {}
        for fraction, p in self._rank_plans.items():
            builder = self._builders[p.hash]
            work = with_ddp_messages(builder.low_rank_work, builder.low_rank_parameters)
            seconds[fraction] = self.costs.predict(work, self.size).step
        return seconds


#: Seconds to time steps for, and the least and largest number of steps.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 1.0, 5, 50


def measured_work(model: TimedModel) -> Work:
    """Measure the compute of a step: averaged over the workers, then scaled to the time of the slowest worker."""
    workers = Workers.of_job("advise")
    for _ in range(2):
        (seconds,) = workers.mean([model.compute_seconds()])
    steps = max(_MIN_STEPS, min(_MAX_STEPS, int(_SECONDS / seconds)))
    work = measure_compute(model.model, lambda: model.step(exchange=False), model.optimizer, steps=steps)
    means = workers.mean([getattr(work, name) for name in COMPUTE_PARTS])
    parts: dict[str, Any] = dict(zip(COMPUTE_PARTS, means, strict=True))
    slowest = max(sum(means), _slowest_seconds(model, steps))
    buffer_bytes = sum(x.nbytes for x in model.inner.buffers()) if workers.size > 1 else 0
    curve = tuple((x, y) for x, y in workers.gather(lambda: work.gradient_curve)[0])
    work = replace(work, **parts, buffer_bytes=buffer_bytes, gradient_curve=curve)
    return with_compute_seconds(work, slowest)


def repeated_seconds(model: TimedModel, seconds: float) -> float:
    """Measure the compute of a few more steps of the slowest worker, for about 0.3 s.

    Args:
        seconds: of a step, as measured before; the same on all workers.
    """
    return _slowest_seconds(model, max(2, min(_MAX_STEPS, int(0.3 * _SECONDS / seconds))))


def _slowest_seconds(model: TimedModel, steps: int) -> float:
    own = torch.tensor([model.compute_seconds() for _ in range(steps)], dtype=torch.float64)
    slowest: list[float] = Workers.of_job("advise").max(own).tolist()
    return trimmed_mean(slowest)


def compute_seconds(work: Work) -> float:
    """Seconds of a step without communication."""
    return float(sum(getattr(work, name) for name in COMPUTE_PARTS))


def with_compute_seconds(work: Work, seconds: float) -> Work:
    """`work` with all parts of the compute scaled so that they take `seconds` together."""
    scale = seconds / compute_seconds(work)
    scaled: dict[str, Any] = {name: scale * getattr(work, name) for name in COMPUTE_PARTS}
    return replace(work, **scaled)


def with_messages(work: Work, model: torch.nn.Module, method: Method | None, size: int) -> Work:
    """Return `work` with the messages of plain DDP, or those of a dry run of a compression method.

    Args:
        model: the model without wrappers.
        method: compression method; None: plain DDP.
    """
    parameters = trainable_parameters(model)
    if method is None:
        return with_ddp_messages(work, parameters)
    if dist.is_initialized():
        dist.barrier()
    return slowest_coding(with_compression(work, method, parameters, size))


def slowest_coding(work: Work) -> Work:
    """Return `work` with the encode and decode times of the slowest worker, for which the others wait."""
    fragments = () if work.local is None else work.local.fragments
    own = [(work.encode, work.decode), *((f.encode, f.decode) for f in fragments)]
    slowest = Workers.of_job("advise").max(torch.tensor(own, dtype=torch.float64)).tolist()
    (encode, decode), *coding = slowest
    if work.local is not None:
        each = zip(fragments, coding, strict=True)
        slow = tuple(replace(fragment, encode=e, decode=d) for fragment, (e, d) in each)
        work = replace(work, local=replace(work.local, fragments=slow))
    return replace(work, encode=encode, decode=decode)


def option_of_slowest(option: TrainingOption) -> TrainingOption:
    """`slowest_coding` for the work of an option and of its warm-up."""
    warm_up = option.warm_up and slowest_coding(option.warm_up)
    return replace(option, work=slowest_coding(option.work), warm_up=warm_up)


def build_timed_model(workload: Workload, method: TrainingMethod, plan: Plan | None = None) -> TimedModel:
    """Build a separate model for one method; call it on all workers.

    Args:
        plan: layers and ranks of a low-rank model. Its factors are random, which does not change the time of a step.
    """
    model = workload.build()
    if method.model != "dense" and plan is not None and plan.ranks:
        random_low_rank_(model, plan)
    return TimedModel(
        method,
        model,
        workload.optimizer,
        lambda net: workload.forward(net, workload.batch()),
        clip=workload.clip,
    )


def exchange_method(name: str) -> TrainingMethod:
    """Parse one of `--methods`: compression or local steps."""
    method = training_method(name)
    if (method.compress is None and method.local is None) or method.model != DENSE:
        raise ValueError(
            f"--methods {name}: pass compression methods and local steps only; low rank and combinations are always tried"
        )
    return method


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that is needed to run the training steps of one worker."""

    name: str
    build: Callable[[], nn.Module]  # builds the same model on each call
    batch: Callable[[], Any]  # the next batch of this worker
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Any]  # an optimizer or an `OptimizerList`
    keep: Sequence[str] = ()  # layers that stay full-rank
    rank: float = 0.25
    steps: int | None = None  # of the whole run
    rows: int | None = None  # of one worker's batch
    warm_up: float = WARM_UP_FRACTION
    device: str = "cpu"
    precision: str = "fp32"
    clip: float | None = None  # maximum norm of the gradients

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, computed in `precision`."""
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.loss(model, batch)


def load_workload(
    text: str,
    *,
    rank: int = 0,
    size: int = 1,
    device: str = "cpu",
    precision: str = "fp32",
    recipe: str | None = None,
    batch: int | None = None,
    data: Path | None = None,
    keep: Sequence[str] | None = None,
    steps: int | None = None,
) -> Workload:
    """Load the workload of worker `rank` of `size`.

    Args:
        text: name of a task, or `file.py`.
        recipe: recipe of the task; "short" by default.
        batch, keep, steps: global batch size, full-rank layers and steps of the run, instead of the task's.

    >>> load_workload("digits:mlp", size=4).steps
    240
    """
    workload = _from_task(find_task(text), recipe or "short", batch, data, rank, size, device)
    keep, steps = workload.keep if keep is None else keep, workload.steps if steps is None else steps
    return replace(workload, device=device, precision=precision, keep=keep, steps=steps)


def _from_task(
    task: Task, recipe_name: str, batch: int | None, data: Path | None, rank: int, size: int, device: str
) -> Workload:
    from ..train import build_optimizer  # a large import
    from ..train.workers import move_to_device

    recipe = task.recipe(recipe_name)
    recipe = recipe if batch is None else replace(recipe, batch=batch)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return move_to_device(task.build(), device)

    batches: Iterator[Batch]
    steps = None
    if isinstance(task, FileTask) and _has_example(task, batch):
        example = task.example(build(), device)
        batches, rows = repeat(example), len(example[0]) if example[0].dim() else None
    else:
        if recipe.batch % size:
            raise ValueError(
                f"a batch of {recipe.batch} cannot be split equally over {size} workers; change --batch"
            )
        rows = recipe.batch // size
        loaded = task.load(data)
        steps = recipe.epochs * task.steps(loaded, recipe.batch)
        task.check(build(), loaded, device)
        options: dict[str, Any] = {"device": device, "worker": rank, "world_size": size}
        options["generator"] = torch.Generator().manual_seed(0)
        batches = chain.from_iterable(task.batches(loaded, "train", recipe.batch, **options) for _ in count())
    return Workload(
        name=task.name if isinstance(task, FileTask) else repr(task),
        build=build,
        batch=lambda: next(batches),
        loss=lambda model, batch: task.loss(model, batch, recipe),
        optimizer=lambda model: build_optimizer(model, recipe),
        keep=task.keep,
        rank=recipe.rank,
        clip=recipe.clip,
        steps=steps,
        rows=rows,
        warm_up=WARM_UP_FRACTION if recipe.switch_at is None else recipe.switch_at / recipe.epochs,
    )


def _has_example(task: FileTask, batch: int | None) -> bool:
    """Whether a user's file gives one worker's batch; otherwise batches come from its data."""
    example, data = task.file.function("example"), task.file.function("data")
    if example is None and data is None:
        raise ValueError(
            f"{task.name} has neither data() nor example(); add `def example(): return inputs, targets` for one worker's batch"
        )
    if data is None and batch is not None:
        raise ValueError(f"--batch {batch}: example() of {task.name} is the batch; change its size there")
    return example is not None and batch is None
