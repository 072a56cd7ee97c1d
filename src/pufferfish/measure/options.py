"""Options: the ways to make a job's step shorter, their predicted speed-ups, and the table that shows them.

`diagnose` and `pufferfish advise` are told with these words.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..compression import BFloat16, BlockInt8, Int4, Method, Methods
from ..compression.sharded import HEADER, Expected, from_bytes, to_bytes
from ..layers.names import trainable_parameters
from ..lowrank.factorize import low_rank_shapes
from ..planning import Entry, Plan, Table
from .cost_model import CostModel, Work, wire_bytes, with_compression, with_ddp_messages

RANK_RATIO = 0.25  # rank as a fraction of the full rank, as in the Pufferfish paper
WARM_UP_FRACTION = 1 / 3  # fraction of a run trained full-rank before the switch
MIN_SPEEDUP = 1.05  # options whose run is not faster by this factor are not recommended
_BUCKET_CAPS = (1, 5, 10, 25, 50, 100)  # MiB
_ACCUMULATED_BATCHES = (2, 4)
#: Lower bound of the remaining compute time, as a fraction; the savings of single layers may add up to more than the step.
_MIN_COMPUTE = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingOption:
    """A change to a training job, and the work of one step after it."""

    kind: str  # "free", "buckets", "low rank", "compression" or "both"
    name: str
    work: Work
    method: Method | None = None  # compression method
    batches: int = 1  # batches per step
    warm_up: Work | None = None  # a step before the switch, if the option has a warm-up
    note: str = ""


@dataclass(eq=False)
class OptionBuilder:
    """Builds the training options of a job. Does not change the model, its gradients or the global random state."""

    model: nn.Module  # without wrappers
    work: Work  # the current step
    size: int  # number of workers
    method: Methods | None  # compression in use; None: plain DDP
    plan: Plan  # layers and ranks of the low-rank options
    note: str  # caveat shown with the low-rank options
    low_rank_compute: Work | None = None  # computation of a low-rank step, if it was measured

    def __post_init__(self) -> None:
        self.parameters = trainable_parameters(self.model)
        self.device = next(iter(self.parameters.values())).device
        self.compute = replace(self.work, encode=0.0, decode=0.0, messages=(), overlaps=False)
        self.low_rank_parameters = trainable_parameters(low_rank_shapes(self.model, self.plan))

    def options(self, methods: Sequence[Method]) -> Iterator[TrainingOption]:
        """All options except low rank combined with compression."""
        if self.size > 1:
            if self.method is None:
                for cap in _BUCKET_CAPS:
                    work = with_ddp_messages(self.compute, self.parameters, cap)
                    yield TrainingOption(kind="buckets", name=f"DDP(…, bucket_cap_mb={cap})", work=work)
            if self.method != BFloat16():
                yield replace(self.compressed_option(BFloat16()), kind="free")
            for n in _ACCUMULATED_BATCHES:
                name, note = f"{n} batches per step, ddp.no_sync()", "larger batch: tune the learning rate"
                work = self.work.accumulated(n)
                yield TrainingOption(kind="free", name=name, work=work, batches=n, note=note)
            for method in methods:
                if method != self.method:
                    yield self.compressed_option(method)
        if self.plan.ranks:
            yield self.low_rank_option()

    def low_rank_option(self) -> TrainingOption:
        """Low rank after a full-rank warm-up."""
        work = with_ddp_messages(self.low_rank_work, self.low_rank_parameters)
        name = f"pf.Switch(rank={RANK_RATIO})"
        return TrainingOption(kind="low rank", name=name, work=work, warm_up=self.work, note=self.note)

    def compressed_option(self, method: Method, per_node: int = 1) -> TrainingOption:
        """Compression by `method` instead of the current one; only between machines if `per_node` is above 1."""
        work = with_compression(self.compute, method, self.parameters, self.size, per_node=per_node)
        hierarchy = ', settings=pf.compression.Settings(hierarchy="node")' if per_node > 1 else ""
        name = f"pf.compress(ddp, {as_code(method)}{hierarchy})"
        return TrainingOption(kind="compression", name=name, work=work, method=method)

    def combined_option(self, compressed: TrainingOption, per_node: int = 1) -> TrainingOption:
        """Low rank, with its gradients compressed as in `compressed`; only between machines if `per_node` is above 1."""
        method = compressed.method
        assert method is not None
        work = with_compression(
            self.low_rank_work,
            method,
            self.low_rank_parameters,
            self.size,
            device=self.device,
            per_node=per_node,
        )
        name = f"low rank with {as_code(method)}"
        return TrainingOption(
            kind="both", name=name, work=work, method=method, warm_up=compressed.work, note=self.note
        )

    @property
    def low_rank_work(self) -> Work:
        """Computation of a low-rank step: measured, from layer timings, or proportional to MACs; without messages."""
        if self.low_rank_compute is not None:
            return self.low_rank_compute
        before, after, dense = self.plan.before, self.plan.after, self.compute
        saved = {e.layer: e.ms[0] - e.ms[1] for e in self.plan if e.rank is not None and e.ms is not None}
        if saved:
            seconds = dense.forward + dense.backward
            forward = backward = max(0.0, 1 - sum(saved.values()) / 1e3 / seconds) if seconds else 1.0
        else:
            forward = _ratio(after.forward_macs, before.forward_macs)
            backward = _ratio(after.backward_macs, before.backward_macs)
        return replace(
            dense,
            forward=dense.forward * forward,
            backward=dense.backward * backward,
            optimizer=dense.optimizer * _ratio(after.trainable, before.trainable),
        )


@dataclass(frozen=True, kw_only=True)
class ShardedMessage:
    """A gather of a sharded module's parameters, or a reduction of its gradients, as FSDP2 asks for it in a step."""

    module: str
    gathers: bool  # parameters; otherwise gradients are reduced
    first: bool  # gather of its module in a forward and backward pass
    elements: int  # of a shard
    itemsize: int
    changes: int = 0  # bytes of what `Changed` would send, without its header
    coding: float = 0.0  # seconds to encode that and to decode what the other workers send

    def message(self, size: int, itemsize: int | None = None) -> tuple[str, int]:
        """Collective, and bytes passed to it, without compression. gloo's reduce-scatter is an all-reduce."""
        nbytes = self.elements * (itemsize or self.itemsize)
        return ("all_gather", nbytes) if self.gathers else ("all_reduce", nbytes * size)


@dataclass(eq=False)
class ShardedOptions:
    """Builds the options of a model that FSDP2 shards over all workers, whose messages nothing hides."""

    compute: Work  # of the current step, without messages
    size: int  # number of workers
    per_node: int  # workers on each machine
    messages: Sequence[ShardedMessage]  # of the current step
    _coded: dict[tuple[Method, int], tuple[int, float]] = field(default_factory=dict)

    @property
    def work(self) -> Work:
        """The current step."""
        return self._with_messages(self.messages)

    def options(self) -> Iterator[TrainingOption]:
        """Accumulation, kept parameters in bf16, shards inside machines, and compression."""
        if self.size == 1:
            return
        gathers = [m for m in self.messages if m.gathers]
        reductions = [m for m in self.messages if not m.gathers]
        for n in _ACCUMULATED_BATCHES:
            work = self._with_messages([*n * gathers, *reductions]).accumulated(n)
            name = f"{n} batches per step, model.set_requires_gradient_sync(False)"
            note = f"larger batch: tune the learning rate; {self._holds(reductions, 'gradients')}"
            yield TrainingOption(kind="free", name=name, work=work, batches=n, note=note)
        once = {m.module: m for m in gathers}
        kept = self._with_messages([m for m in gathers if m.first] + reductions, largest=2)
        if kept.messages != self.work.messages:
            note = self._holds(once.values(), "parameters", largest=2)
            yield TrainingOption(
                kind="free", name="reshard_after_forward=False, bf16 both ways", work=kept, note=note
            )
        if 1 < self.per_node < self.size:
            yield self._inside_machines(gathers, reductions)
        for method in (BlockInt8(), Int4()):
            arguments = "model" if method == BlockInt8() else f"model, {as_code(method)}"
            yield TrainingOption(
                kind="compression", name=f"pf.compress({arguments})", work=self._compressed(method),
                method=method, note=self._holds(once.values(), "parameters"),
            )  # fmt: skip

    def _with_messages(self, messages: Iterable[ShardedMessage], largest: int = 8) -> Work:
        """The computation with these messages, in dtypes of at most `largest` bytes."""
        sent = tuple(m.message(self.size, min(m.itemsize, largest)) for m in messages)
        return replace(self.compute, messages=sent)

    def _holds(self, messages: Iterable[ShardedMessage], what: str, largest: int = 8) -> str:
        """What each worker holds of all shards during a step."""
        nbytes = sum(m.elements * self.size * min(m.itemsize, largest) for m in messages)
        return f"holds {nbytes / 1e6:.3g} MB of {what}"

    def _inside_machines(
        self, gathers: Sequence[ShardedMessage], reductions: Sequence[ShardedMessage]
    ) -> TrainingOption:
        """HSDP: gathers and reduce-scatters inside a machine, all-reduces between machines.

        Inside, the same bytes are counted as an all-reduce and a broadcast, as with `hierarchy="node"`.
        """
        machines = self.size // self.per_node
        between = tuple(m.message(self.size) for m in reductions)
        inside = self.size * sum(m.elements * m.itemsize for m in (*gathers, *reductions)) // 2
        work = replace(self.compute, messages=between, intra_node_bytes=inside)
        name = f"fully_shard(…, mesh={machines} × {self.per_node}), shards inside machines"
        return TrainingOption(kind="free", name=name, work=work, note=f"shards {machines} times as large")

    def _compressed(self, method: Method) -> Work:
        """A step with `pf.compress(model, method)`."""
        sent, coding = [], 0.0
        for m in self.messages:
            if m.gathers:
                nbytes, seconds = Expected(last=m.changes).size(m.elements * m.itemsize), m.coding
                sent.append(("all_gather", HEADER + nbytes))
            else:
                nbytes, seconds = self._time_reduction(method, m.elements)
                sent.append(("all_to_all", nbytes * self.size))
            coding += seconds
        return replace(self.compute, messages=tuple(sent), encode=coding)

    def _time_reduction(self, method: Method, elements: int) -> tuple[int, float]:
        """Bytes of an encoded shard, and seconds to encode a shard for each worker and to add up as many."""
        if (method, elements) not in self._coded:
            shard = torch.randn(elements, generator=torch.Generator().manual_seed(0))
            total = torch.zeros(elements)
            for _ in range(2):  # the first is not timed
                start = time.perf_counter()
                for _ in range(self.size):
                    data = to_bytes(method, shard)
                    total += from_bytes(method, data, elements, torch.float32)
                seconds = time.perf_counter() - start
            self._coded[method, elements] = len(data), seconds
        return self._coded[method, elements]


def as_code(method: Method | None) -> str:
    """Format a method as Python code for a user who imports pufferfish as `pf` and their own methods by name.

    >>> as_code(BFloat16())
    'pf.compression.BFloat16()'
    """
    return f"pf.compression.{method!r}" if type(method).__module__.startswith("pufferfish.") else repr(method)


def _ratio(after: int | None, before: int | None) -> float:
    return after / before if after is not None and before else 1.0


def select_layers(plan: Plan, work: Work, costs: CostModel, size: int, share: float = 1.0) -> Plan:
    """Return the plan with those layers left dense that low rank slows down by more than their smaller gradients save.

    Layers that are faster low-rank are always selected. The others are added one by one while the predicted step gets
    shorter, starting with those that save the most bytes for the time they lose.

    Args:
        plan: ranks, with times where layers were timed.
        work: a dense step with its messages.
        share: fraction of the gradient bytes that is sent, if a method compresses them.

    >>> import torch, pufferfish as pf
    >>> from pufferfish.measure import Link
    >>> plan = pf.plan(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    >>> slower = plan.replace(replace(e, ms=(1.0, 1.5)) for e in plan)
    >>> work = Work(forward=0.001, backward=0.002, messages=(("all_reduce", 263_168),))
    >>> for bandwidth in (1e8, 1e10):
    ...     costs = CostModel(link=Link.nominal(bandwidth=bandwidth, latency=0, size=2))
    ...     print(len(select_layers(slower, work, costs, 2).ranks))
    1
    0
    """
    layers: dict[str, list[Entry]] = {}
    for e in plan:
        if e.rank is not None:
            layers.setdefault(e.layer, []).append(e)
    saves = {name: _saves(entries) for name, entries in layers.items()}
    total = plan.before.gradient_bytes

    def step(selected: set[str]) -> float:
        seconds = sum(saves[name][0] for name in selected)
        left = 1 - sum(saves[name][1] for name in selected) / total if total else 1.0
        return costs.predict(_smaller(work, seconds, share * left), size).step

    def seconds_per_byte(name: str) -> float:
        seconds, nbytes = saves[name]
        return seconds / max(nbytes, 1)

    selected = {name for name, entries in layers.items() if entries[0].ms is None or saves[name][0] > 0}
    best = step(selected)
    for name in sorted(layers.keys() - selected, key=seconds_per_byte, reverse=True):
        if (candidate := step(selected | {name})) < best:
            selected, best = selected | {name}, candidate
    if best >= step(set()):
        selected = set()
    return plan.replace(
        e if e.rank is None or e.layer in selected else e.keep_dense(_reason(e)) for e in plan
    )


def _saves(entries: Sequence[Entry]) -> tuple[float, int]:
    """Seconds and gradient bytes of a step that a layer saves when it is low-rank."""
    dense, low_rank = entries[0].ms or (0.0, 0.0)  # entries share one timing
    nbytes = sum((e.before - e.after) * e.itemsize for e in entries if e.trainable)
    return (dense - low_rank) / 1e3, nbytes


def _smaller(work: Work, seconds: float, share: float) -> Work:
    """`work` with `seconds` less computation and `share` of the bytes."""
    compute = work.forward + work.backward
    factor = max(_MIN_COMPUTE, 1 - seconds / compute) if compute else 1.0
    messages = tuple((kind, round(share * nbytes)) for kind, nbytes in work.messages)
    return replace(work, forward=factor * work.forward, backward=factor * work.backward, messages=messages)


def _reason(e: Entry) -> str:
    times = "" if e.ms is None else f": {e.ms[0]:.3g} ms dense, {e.ms[1]:.3g} ms low-rank"
    return f"does not make the step shorter on this network{times}"


@dataclass(frozen=True, kw_only=True)
class SpeedupEstimate:
    """Step time and speed-ups of a training option: predicted, or measured if `measured` is set."""

    kind: str
    name: str
    step: float  # predicted seconds, per current number of batches in a step
    speedup: float  # of a step
    run_speedup: float  # of the whole run, including warm-up
    hours: float | None  # of the whole run, if its number of steps is known
    wire_bytes: float  # sent by a worker in a step
    note: str = ""
    measured: float | None = None  # seconds of a step, if the option was run
    interval: tuple[float, float] | None = None  # of `run_speedup`, if the measurement was repeated
    utilisation: float | None = None  # predicted computing time over the time of a step


def estimate(
    option: TrainingOption,
    current: Work,
    costs: CostModel,
    size: int,
    *,
    waiting: float = 0.0,
    warm_up: float = WARM_UP_FRACTION,
    hours: float | None = None,
) -> SpeedupEstimate:
    """Predict step time, speed-ups and bytes of `option`.

    Args:
        current: the current step, which the speed-ups are over.
        size: number of workers.
        waiting: seconds of a step spent waiting for the slowest worker.
        warm_up: fraction of the run, for options with a warm-up.
        hours: of the whole run at the current speed.

    >>> from pufferfish.measure import Link
    >>> current = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> half = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 5 * 10**6),))
    >>> costs = CostModel(link=Link.nominal(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> round(estimate(TrainingOption(kind="free", name="half", work=half), current, costs, 2).speedup, 2)
    1.12
    """

    predicted = costs.predict(option.work, size)
    before = costs.predict(current, size).step + waiting
    first = after = (predicted.step + waiting) / option.batches
    if option.warm_up:
        first = costs.predict(option.warm_up, size).step + waiting
    run_speedup = before / (warm_up * first + (1 - warm_up) * after)
    return SpeedupEstimate(
        kind=option.kind,
        name=option.name,
        step=after,
        speedup=before / after,
        run_speedup=run_speedup,
        hours=None if hours is None else hours / run_speedup,
        wire_bytes=wire_bytes(option.work, size, costs.link.per_node) / option.batches,
        note=option.note,
        utilisation=predicted.utilisation,
    )


def estimate_table(estimates: Sequence[SpeedupEstimate]) -> Table:
    """One row per estimate, with columns for measured times, intervals and the run's time if any estimate has them.

    >>> dense = SpeedupEstimate(
    ...     kind="", name="dense", step=0.1, speedup=1, run_speedup=1, hours=0.25, wire_bytes=1e6, measured=0.11
    ... )
    >>> print(estimate_table([dense]))
          ms/step  measured  error  MB sent   step    run    time
    dense     100       110    -9%        1  1.00×  1.00×  15 min
    """
    head = ["", "", "ms/step", "measured", "error", "MB sent", "step", "run", "range", "time", "note"]
    rows = [
        [
            e.kind, e.name, f"{1e3 * e.step:.4g}",
            f"{1e3 * e.measured:.4g}" if e.measured is not None else "",
            f"{e.step / e.measured - 1:+.0%}" if e.measured is not None else "",
            f"{e.wire_bytes / 1e6:.3g}", f"{e.speedup:.2f}×", f"{e.run_speedup:.2f}×", _range(e),
            format_hours(e.hours), e.note,
        ]
        for e in estimates
    ]  # fmt: skip
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    left = [place for place, i in enumerate(used) if head[i] in ("", "note")]
    cells = [[row[i] for i in used] for row in (head, *rows)]
    return Table(cells, left, spare=("note", "MB sent", "error", "measured"))


def _range(e: SpeedupEstimate) -> str:
    ends = [f"{x:.2f}" for x in e.interval or ()]
    return "" if ends == ["1.00", "1.00"] else "–".join(ends)  # the dense method itself


def format_hours(hours: float | None) -> str:
    """Format a duration given in hours, with a suitable unit.

    >>> format_hours(30.0), format_hours(0.5), format_hours(0.03), format_hours(0.001)
    ('30 h', '30 min', '108 s', '3.6 s')
    """
    if hours is None:
        return ""
    for unit, seconds in (("h", 3600), ("min", 60)):
        if hours * 3600 >= 2 * seconds:
            return f"{hours * 3600 / seconds:.3g} {unit}"
    short = hours * 3600
    return f"{short:.0f} s" if short >= 10 else f"{short:.2g} s"


def format_seconds(seconds: float) -> str:
    """Format the duration of a step.

    >>> format_seconds(0.0123), format_seconds(6.04)
    ('12.3 ms', '6.04 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
