"""What could make a step shorter, each with the work that it would be: free remedies, low rank, compression, both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..compress.casts import BFloat16
from ..compress.method import Method
from ..compress.table import Methods
from ..factorize import reshape_
from ..layers import hollow
from ..names import own_name
from ..plan import Plan
from ..planning import plan
from .dryrun import Sent, dry_run
from .model import MIB, Work, buckets

RATIO = 0.25
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
    """

    def __init__(
        self, model: nn.Module, work: Work, size: int, method: Methods | None, plan: Plan, note: str
    ) -> None:
        self.model, self.work, self.size, self.method = model, work, size, method
        self.plan, self.note = plan, note
        self.like = gradients(model)
        self.device = next(iter(self.like.values())).device
        self.bare = replace(work, encode=0.0, decode=0.0, messages=(), overlaps=False)
        self.small = gradients(_reshaped(model, plan))

    def remedies(self, methods: Sequence[Method]) -> Iterator[Remedy]:
        """All but pairs."""
        if self.size > 1:
            yield from self._free()
            for method in methods:
                if method != self.method:
                    yield self.compressed(method, "compression")
        if self.plan.ranks:
            work = self._plain(self.low_rank, self.small, 25)
            name = f"low rank: pf.Switch(rank={RATIO})"
            yield Remedy(kind="low rank", name=name, work=work, warm_up=self.work, note=self.note)

    def pair(self, alone: Remedy) -> Remedy:
        """Low rank, and the method that `alone` is to compress what is left."""
        assert alone.method is not None
        work = _sending(self.low_rank, dry_run(alone.method, self.small, self.size, device=self.device))
        name = f"low rank with pf.{alone.method!r}"
        return Remedy(
            kind="both", name=name, work=work, method=alone.method, warm_up=alone.work, note=self.note
        )

    def compressed(self, method: Method, kind: str) -> Remedy:
        """One method in the place of what there is."""
        work = _sending(self.bare, dry_run(method, self.like, self.size))
        return Remedy(kind=kind, name=f"pf.compress(ddp, pf.{method!r})", work=work, method=method)

    def _free(self) -> Iterator[Remedy]:
        if self.method is None:
            for cap in _BUCKETS:
                work = self._plain(self.bare, self.like, cap)
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

    def _plain(self, work: Work, like: Mapping[str, Tensor], cap: int) -> Work:
        """With the messages of plain DDP."""
        sizes = buckets((x.nbytes for x in reversed(list(like.values()))), cap * MIB)
        messages = tuple(("all_reduce", nbytes) for nbytes in sizes)
        return replace(work, messages=messages, overlaps=True)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Tensors like the gradients, by name."""
    return {own_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments without their values, as `plan` takes an example; nothing of the batch is kept.

    >>> import torch
    >>> shapes(nn.Linear(4, 2), (torch.ones(3, 4),), {})
    {'input': tensor(..., device='meta', size=(3, 4))}
    """
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args
    if bound.args and any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return bound.args
    named = dict(bound.arguments)
    for p in bound.signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            named |= named.pop(p.name, {})
    return named


def planned(model: nn.Module, call: Any, measure: bool) -> tuple[Plan, str]:
    """A plan at the ratio of the paper, and what to know of it."""
    warm_up = "a third of the run is warm-up"
    try:
        made = plan(model, RATIO, example=call, measure=measure and call is not None)
        note = f"{'layers timed' if measure else 'if time follows MACs'}; {warm_up}"
    except Exception:  # on shapes alone a model that looks at values may fail in any way
        made, note = plan(model, RATIO), f"MACs unknown, computing taken as unchanged; {warm_up}"
    try:
        _reshaped(model, made)
    except ValueError as error:
        made = made.replace(e.stays(str(error)) for e in made)
    return made, note


def _reshaped(model: nn.Module, made: Plan) -> nn.Module:
    shadow = hollow(model)
    if made.ranks:
        reshape_(shadow, made)
    return shadow


def _sending(work: Work, sent: Sent) -> Work:
    return replace(
        work, messages=sent.messages, overlaps=sent.overlaps, encode=sent.encode, decode=sent.decode
    )


def _share(after: int | None, before: int | None) -> float:
    return after / before if after is not None and before else 1.0
