"""`advise`: measures the compute of a step, predicts all training methods on a network, and can run the best ones."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compression import NoCompression
from ...compression.method import Method
from ...distributed.workers import Workers
from ...measure import CostModel, Link, SpeedupEstimate, Work, probe
from ...measure.measure_compute import COMPUTE_PARTS
from ...measure.option_builder import OptionBuilder, TrainingOption
from ...measure.select_layers import select_layers
from ...measure.speedup_estimate import SpeedupEstimator, wire_bytes
from ...measure.step_messages import (
    probe_bytes,
    trainable_parameters,
    with_ddp_messages,
    with_fsdp2_messages,
    with_local_exchange,
)
from ...planning.plan import Plan
from ...planning.planner import plan
from ..train.local_method import LOCAL_METHODS
from ..train.training_method import TrainingMethod, training_method
from .advice import Advice
from .build_timed_model import build_timed_model
from .measured_work import measured_work, slowest_coding
from .method_name import LOW_RANK, NODE, is_local, parse_method_name, warm_up_name
from .timing_rounds import step_times
from .workload import Workload

#: Compression methods and local steps that are tried by default, the simplest first.
METHODS = ("bf16", "int8", "topk-0.01", "powersgd-4", *LOCAL_METHODS)
#: Fractions of the full rank for which the time of a low-rank step is shown.
RANK_RANGE = (0.125, 0.5)
_NOTE = "after a full-rank warm-up"
_LOCAL_NOTE = "local steps: compare the quality"


def advise(
    workload: Workload,
    link: Link | None = None,
    *,
    network: str = "real",
    nodes: int,
    per_node: int = 1,
    engine: str = "ddp",
    methods: Sequence[str] = METHODS,
) -> Advice:
    """Estimate the speed of training methods on `nodes` machines of `per_node` workers. Call it on all workers of a job.

    Args:
        link: the link between the workers; None: that of this job, which is probed.
        network: name of the network, for the summary.
        engine: "ddp" or "fsdp2".
    """
    return _Advisor(workload, link, nodes, per_node, engine, methods).advice(network)


def check(advice: Advice, workload: Workload, rounds: int = 5, best: int | None = 3) -> Advice:
    """Run dense training and the best methods in this job, with their warm-ups, and return advice by measured times.

    Args:
        rounds: rounds in which the methods are timed, interleaved.
        best: how many methods to run; None: all.
    """
    candidates = advice.estimates if best is None else advice.top(best)
    names = dict.fromkeys(["dense", *(name for e in candidates for name in (warm_up_name(e.name), e.name))])
    models = {}
    for name in names:
        method, hierarchy = parse_method_name(name)
        models[name] = build_timed_model(workload, method, advice.plans.get(name), hierarchy)
    times = step_times(models, rounds)
    medians = Workers.of_job("advise").mean([statistics.median(seconds) for seconds in times.values()])
    return advice.with_measurements(dict(zip(times, medians, strict=True)))


class _Advisor:
    """Measures the compute of a workload, and predicts the methods from it."""

    def __init__(
        self,
        workload: Workload,
        link: Link | None,
        nodes: int,
        per_node: int,
        engine: str,
        methods: Sequence[str],
    ) -> None:
        self.workload, self.nodes, self.per_node, self.engine = workload, nodes, per_node, engine
        self.size = nodes * per_node
        parsed = {n: exchange_method(n) for n in (methods if engine == "ddp" else ("bf16",))}
        self.methods = {n: method.compress for n, method in parsed.items() if method.compress is not None}
        #: Every worker is a replica, so only for one worker on each machine.
        self.local = {n: m.local for n, m in parsed.items() if m.local is not None and per_node == 1}
        self.workers = Workers.of_job("advise")
        dense = build_timed_model(workload, training_method("dense"))
        self.model = dense.inner
        self.workers.run_on_all(self._check_loss)
        first = measured_work(dense)
        self.layer_times = self._measure_layers(workload.rank)
        self.compute = _faster(first, measured_work(dense))
        link = link or probe(device=workload.device, largest=probe_bytes(self.model))
        self.costs = CostModel(link=link)
        self.dense = self._with_plain_messages(self.compute, trainable_parameters(self.model))
        self.plans: dict[str, Plan] = {}
        self._builders: dict[str, OptionBuilder] = {}  # of low-rank models, by the hash of their plan

    def advice(self, network: str) -> Advice:
        step = self.costs.predict(self.dense, self.size).step
        estimator = SpeedupEstimator(
            costs=self.costs, current=self.dense, size=self.size, warm_up=self.workload.warm_up,
            hours=None if self.workload.steps is None else self.workload.steps * step / 3600,
        )  # fmt: skip
        dense = TrainingOption(kind="", name="dense", work=self.dense)
        estimates = [estimator.estimate(_slowest_coding(o)) for o in (dense, *self._options())]
        return Advice(
            workload=self.workload.name, network=network, nodes=self.nodes, per_node=self.per_node,
            engine=self.engine, link=self.costs.link, compute=self.compute, estimates=_by_simplicity(estimates),
            plans=self.plans, ceiling=step / sum(getattr(self.compute, part) for part in COMPUTE_PARTS),
            rank_seconds=self._rank_seconds(), warm_up=self.workload.warm_up,
        )  # fmt: skip

    def _check_loss(self) -> None:
        """Raise ValueError for a loss that is not finite: compression skips such steps, which makes them faster."""
        loss = float(self.workload.forward(self.workload.build(), self.workload.batch()).detach())
        if not math.isfinite(loss):
            raise ValueError(
                f"{self.workload.name}: the loss of the untrained model is {loss}; it must be finite to be timed"
            )

    def _options(self) -> Iterator[TrainingOption]:
        """All methods but dense, under their names on the command line."""
        builder = OptionBuilder(self.model, self.dense, self.size, None, self.layer_times, _NOTE)
        methods = self.methods if self.size > 1 else {}
        compressed = {name: self._compressed(builder, name, method) for name, method in methods.items()}
        dense_bytes = max(1, sum(n for _, n in self.dense.messages))
        shares = {LOW_RANK: 1.0} | {
            f"{LOW_RANK}+{name}": sum(n for _, n in option.work.messages) / dense_bytes
            for name, option in compressed.items()
        }
        for name in self.local if self.size > 1 else ():
            work = self._local_work(name, self.compute, builder.parameters)
            compressed[name] = TrainingOption(kind="", name=name, work=work, note=_LOCAL_NOTE)
            dense_wire = max(1.0, wire_bytes(self.dense, self.size))
            shares[f"{LOW_RANK}+{name}"] = wire_bytes(work, self.size) / dense_wire
        plans = {
            name: select_layers(self.layer_times, self.dense, self.costs, self.size, share)
            for name, share in shares.items()
        }
        self.plans = {name: selected for name, selected in plans.items() if selected.ranks}
        self._measure_low_rank([*self.plans.values(), *self._rank_plans().values()])
        if LOW_RANK in self.plans:
            yield replace(self._low_rank(self._builders[self.plans[LOW_RANK].hash]), name=LOW_RANK)
        for name, option in compressed.items():
            yield option
            both = f"{LOW_RANK}+{name}"
            if both in self.plans:
                yield replace(self._combined(self._builders[self.plans[both].hash], option), name=both)
        if 1 < self.per_node < self.size and self.engine == "ddp":
            yield from self._hierarchical_options(builder)

    def _hierarchical_options(self, builder: OptionBuilder) -> Iterator[TrainingOption]:
        """The same methods and plans with a hierarchy of machines."""
        for name, method in {"dense": NoCompression(), **self.methods}.items():
            option = builder.compressed_option(method, per_node=self.per_node)
            yield replace(option, kind="", name=name + NODE)
            both = LOW_RANK if name == "dense" else f"{LOW_RANK}+{name}"
            if both in self.plans:
                self.plans[both + NODE] = self.plans[both]
                combined = self._builders[self.plans[both].hash].combined_option(option, self.per_node)
                yield replace(combined, kind="", name=both + NODE)

    def _measure_low_rank(self, plans: Sequence[Plan]) -> None:
        """Measure the compute of each low-rank model twice, interleaved, and keep the faster: noise only adds time."""
        models = {p.hash: build_timed_model(self.workload, training_method(LOW_RANK), p) for p in plans}
        first, second = ({key: measured_work(model) for key, model in models.items()} for _ in range(2))
        for p in plans:
            compute = _faster(first[p.hash], second[p.hash])
            self._builders[p.hash] = OptionBuilder(self.model, self.dense, self.size, None, p, _NOTE, compute)

    def _compressed(self, builder: OptionBuilder, name: str, method: Method) -> TrainingOption:
        if self.engine == "fsdp2":
            work = with_fsdp2_messages(self.compute, trainable_parameters(self.model), self.size, itemsize=2)
            return TrainingOption(kind="", name=name, work=work, method=method, note="MixedPrecisionPolicy")
        return replace(builder.compressed_option(method), kind="", name=name)

    def _low_rank(self, builder: OptionBuilder) -> TrainingOption:
        if self.engine == "fsdp2":
            work = with_fsdp2_messages(builder.low_rank_work, builder.low_rank_parameters, self.size)
            return TrainingOption(kind="", name="", work=work, warm_up=self.dense, note=_NOTE)
        return replace(builder.low_rank_option(), kind="")

    def _local_work(self, name: str, compute: Work, parameters: Mapping[str, Tensor]) -> Work:
        local = self.local[name]
        return with_local_exchange(
            compute,
            local.schedule,
            local.settings.method,
            parameters,
            self.size,
            torch.device(self.workload.device),
        )

    def _combined(self, builder: OptionBuilder, compressed: TrainingOption) -> TrainingOption:
        if compressed.name in self.local:
            work = self._local_work(compressed.name, builder.low_rank_work, builder.low_rank_parameters)
            return TrainingOption(
                kind="", name="", work=work, warm_up=compressed.work, note=f"{_NOTE}; {_LOCAL_NOTE}"
            )
        if self.engine == "fsdp2":
            parameters = builder.low_rank_parameters
            work = with_fsdp2_messages(builder.low_rank_work, parameters, self.size, itemsize=2)
            return TrainingOption(kind="", name="", work=work, warm_up=compressed.work, note=_NOTE)
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
            return ranks.replace(replace(e, ms=t.ms, fused=t.fused) for e, t in both).to_json()

        return Plan.from_json(self.workers.broadcast_object(self.workers.run_on_all(measure)))

    def _rank_plans(self) -> dict[float, Plan]:
        """The plan of low rank without compression, at the ranks of `RANK_RANGE`."""
        if LOW_RANK not in self.plans:
            return {}
        layers = [*self.plans[LOW_RANK].ranks]
        plans = {fraction: plan(self.model, fraction, only=layers) for fraction in RANK_RANGE}
        return {fraction: p for fraction, p in plans.items() if p.ranks}

    def _rank_seconds(self) -> dict[float, float]:
        seconds = {}
        for fraction, p in self._rank_plans().items():
            builder = self._builders[p.hash]
            work = self._with_plain_messages(builder.low_rank_work, builder.low_rank_parameters)
            seconds[fraction] = self.costs.predict(work, self.size).step
        return seconds

    def _with_plain_messages(self, work: Work, parameters: Mapping[str, Tensor]) -> Work:
        if self.engine == "fsdp2":
            return with_fsdp2_messages(work, parameters, self.size)
        return with_ddp_messages(work, parameters)


def _slowest_coding(option: TrainingOption) -> TrainingOption:
    warm_up = option.warm_up and slowest_coding(option.warm_up)
    return replace(option, work=slowest_coding(option.work), warm_up=warm_up)


def _faster(a: Work, b: Work) -> Work:
    return min(a, b, key=lambda work: work.forward + work.backward + work.optimizer + work.data)


def exchange_method(name: str) -> TrainingMethod:
    """Parse one of `--methods`: compression or local steps.

    >>> exchange_method("powersgd-4").compress, exchange_method("diloco-30").local.h
    (PowerSGD(rank=4), 30)
    """
    method = training_method(name)
    if (method.compress is None and method.local is None) or method.model != "dense":
        raise ValueError(
            f"--methods {name}: pass compression methods and local steps only; low rank and combinations are always tried"
        )
    return method


def _by_simplicity(estimates: list[SpeedupEstimate]) -> list[SpeedupEstimate]:
    """Dense, bf16, low rank, then methods with a larger compression error, then local steps; each without a hierarchy first."""
    simple = ["dense", "bf16", LOW_RANK, f"{LOW_RANK}+bf16"]

    def key(e: SpeedupEstimate) -> tuple[int, bool]:
        name = e.name.removesuffix(NODE)
        last = len(simple) + is_local(name)
        return simple.index(name) if name in simple else last, e.name.endswith(NODE)

    return sorted(estimates, key=key)
