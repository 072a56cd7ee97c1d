"""What could make a step shorter, each with the work that it would be: free remedies, low rank, compression, both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..compression.method import Method
from ..compression.methods.casts import BFloat16
from ..compression.settings import Methods
from ..layers.names import own_name
from ..planning.plan import Plan
from .cost_model import MIB, Work, buckets
from .dry_run import Sent, dry_run
from .low_rank_shapes import RATIO, reshaped

_BUCKETS = (1, 5, 10, 25, 50, 100)  # MiB
_ACCUMULATED = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the job, and the work of one step after it."""

    kind: str  # "free", "buckets", "low rank", "compression" or "both"
    name: str
    work: Work
    method: Method | None = None  # of compression
    batches: int = 1  # that a step is for
    warm_up: Work | None = None  # a step before the switch, where there is one
    note: str = ""


class Job:
    """What remedies are for: a model that trains, and the work of one of its steps.

    Nothing here touches the model, its gradients or the global random numbers.

    Args:
        model: without wrappers.
        work: of a step as it is.
        size: workers.
        method: that the gradients go through already; None: plain DDP.
        plan: what low rank would be, and what to know of it.
        small: the computing of a low-rank step, where it was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        work: Work,
        size: int,
        method: Methods | None,
        plan: Plan,
        note: str,
        small: Work | None = None,
    ) -> None:
        self.model, self.work, self.size, self.method = model, work, size, method
        self.plan, self.note, self._small = plan, note, small
        self.like = gradients(model)
        self.device = next(iter(self.like.values())).device
        self.bare = replace(work, encode=0.0, decode=0.0, messages=(), overlaps=False)
        self.small = gradients(reshaped(model, plan))

    def remedies(self, methods: Sequence[Method]) -> Iterator[Remedy]:
        """All but pairs."""
        if self.size > 1:
            yield from self._free()
            for method in methods:
                if method != self.method:
                    yield self.compressed(method, "compression")
        if self.plan.ranks:
            yield self.switched()

    def switched(self) -> Remedy:
        """Low rank after a warm-up."""
        work = plain(self.low_rank, self.small)
        name = f"pf.Switch(rank={RATIO})"
        return Remedy(kind="low rank", name=name, work=work, warm_up=self.work, note=self.note)

    def pair(self, alone: Remedy, per_node: int = 1) -> Remedy:
        """Low rank, and the method that `alone` is for what is left; between machines alone if `per_node` is above 1."""
        assert alone.method is not None
        sent = dry_run(alone.method, self.small, self.size, device=self.device, per_node=per_node)
        work = _sending(plain(self.low_rank, self.small), sent)
        name = f"low rank with {as_code(alone.method)}"
        return Remedy(
            kind="both", name=name, work=work, method=alone.method, warm_up=alone.work, note=self.note
        )

    def compressed(self, method: Method, kind: str) -> Remedy:
        """One method in the place of what there is."""
        work = _sending(plain(self.bare, self.like), dry_run(method, self.like, self.size))
        return Remedy(kind=kind, name=f"pf.compress(ddp, {as_code(method)})", work=work, method=method)

    def by_machine(self, method: Method, per_node: int) -> Remedy:
        """One method between machines, of `per_node` workers each, which average their gradients first."""
        sent = dry_run(method, self.like, self.size, per_node=per_node)
        work = _sending(plain(self.bare, self.like), sent)
        name = f'pf.compress(ddp, {as_code(method)}, levels="node")'
        return Remedy(kind="compression", name=name, work=work, method=method)

    def _free(self) -> Iterator[Remedy]:
        if self.method is None:
            for cap in _BUCKETS:
                work = plain(self.bare, self.like, cap)
                yield Remedy(kind="buckets", name=f"DDP(…, bucket_cap_mb={cap})", work=work)
        if self.method != BFloat16():
            yield self.compressed(BFloat16(), "free")
        for n in _ACCUMULATED:
            yield Remedy(
                kind="free",
                name=f"{n} batches a step, ddp.no_sync()",
                work=self.work.accumulated(n),
                batches=n,
                note="a larger batch: needs another learning rate",
            )

    @property
    def low_rank(self) -> Work:
        """The work of a low-rank step, still without messages."""
        if self._small is not None:
            return self._small
        before, after = self.plan.before, self.plan.after
        saved = {layer: ms[0] - ms[1] for layer, ms in self._timed().items()}
        whole = self.bare.forward + self.bare.backward
        if saved:
            forward = backward = max(0.0, 1 - sum(saved.values()) / 1e3 / whole) if whole else 1.0
        else:
            forward = _share(after.forward_macs, before.forward_macs)
            backward = _share(after.backward_macs, before.backward_macs)
        return replace(
            self.bare,
            forward=self.bare.forward * forward,
            backward=self.bare.backward * backward,
            optimizer=self.bare.optimizer * _share(after.trainable, before.trainable),
        )

    def _timed(self) -> dict[str, tuple[float, float]]:
        return {e.layer: e.ms for e in self.plan if e.rank is not None and e.ms is not None}


def plain(work: Work, like: Mapping[str, Tensor], cap: int = 25) -> Work:
    """With the messages of plain DDP for such gradients, in buckets of `cap` MiB.

    >>> import torch
    >>> plain(Work(forward=1.0, backward=1.0), {"w": torch.ones(10)}).messages
    (('all_reduce', 40),)
    """
    sizes = tuple(buckets((x.nbytes for x in reversed(list(like.values()))), cap * MIB))
    return replace(work, messages=tuple(("all_reduce", n) for n in sizes), overlaps=True, handed=sizes)


def as_code(method: Method | None) -> str:
    """As a user writes it, who has imported pufferfish as pf and their own methods by name.

    >>> as_code(BFloat16())
    'pf.compression.BFloat16()'
    """
    return f"pf.{method!r}" if type(method).__module__.startswith("pufferfish.") else repr(method)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Tensors like the gradients, by name."""
    return {own_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def message_bytes(model: nn.Module) -> int:
    """How large messages to probe a link with: as the gradients, within reason.

    >>> message_bytes(nn.Linear(1000, 1000))
    4004000
    """
    return min(max(sum(x.nbytes for x in gradients(model).values()), 2**18), 2**25)


def _sending(work: Work, sent: Sent) -> Work:
    return replace(
        work, messages=sent.messages, overlaps=sent.overlaps, inside=sent.inside, encode=sent.encode,
        decode=sent.decode,
    )  # fmt: skip


def _share(after: int | None, before: int | None) -> float:
    return after / before if after is not None and before else 1.0
