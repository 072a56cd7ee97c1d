"""`OptionBuilder`: the ways to make a job's step shorter, each as a `TrainingOption` with the work of the changed step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..compression import BFloat16, Method
from ..compression.settings import Methods
from ..planning.plan import Plan
from .cost_model import Work
from .dry_run import dry_run
from .low_rank_shapes import RANK_RATIO, low_rank_shapes
from .step_messages import trainable_parameters, with_ddp_messages

_BUCKET_CAPS = (1, 5, 10, 25, 50, 100)  # MiB
_ACCUMULATED_BATCHES = (2, 4)


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
            yield from self._lossless_options()
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
        traffic = dry_run(method, self.parameters, self.size, per_node=per_node)
        work = replace(with_ddp_messages(self.compute, self.parameters), **vars(traffic))
        hierarchy = ', hierarchy="node"' if per_node > 1 else ""
        name = f"pf.compress(ddp, {as_code(method)}{hierarchy})"
        return TrainingOption(kind="compression", name=name, work=work, method=method)

    def combined_option(self, compressed: TrainingOption, per_node: int = 1) -> TrainingOption:
        """Low rank, with its gradients compressed as in `compressed`; only between machines if `per_node` is above 1."""
        method = compressed.method
        assert method is not None
        traffic = dry_run(method, self.low_rank_parameters, self.size, device=self.device, per_node=per_node)
        plain = with_ddp_messages(self.low_rank_work, self.low_rank_parameters)
        work, name = replace(plain, **vars(traffic)), f"low rank with {as_code(method)}"
        return TrainingOption(
            kind="both", name=name, work=work, method=method, warm_up=compressed.work, note=self.note
        )

    def _lossless_options(self) -> Iterator[TrainingOption]:
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


def as_code(method: Method | None) -> str:
    """Format a method as Python code for a user who imports pufferfish as `pf` and their own methods by name.

    >>> as_code(BFloat16())
    'pf.compression.BFloat16()'
    """
    return f"pf.compression.{method!r}" if type(method).__module__.startswith("pufferfish.") else repr(method)


def _ratio(after: int | None, before: int | None) -> float:
    return after / before if after is not None and before else 1.0
