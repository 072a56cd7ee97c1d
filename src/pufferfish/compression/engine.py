"""`Engine`: one worker's part in averaging named gradients, by any method, with error feedback where it needs some."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.workers import Workers
from .batch import Batch, Layout, make_batches, make_buckets
from .exchange import Exchange, Group, Transport
from .hierarchy import machine_for
from .meter import Meter
from .method import MessageGenerator, StepContext, Sum
from .methods.accordion import Accordion
from .settings import Settings
from .state import State

#: Bytes of gradients that are sent together during the backward pass.
BUCKET = 25 * 2**20
#: Larger norms count as not finite: their squares may overflow fp32. Norms below about 1e-22 underflow to 0.
_LIMIT = 1e15


class Engine:
    """Averages gradients over the workers of a group. The DDP and FSDP2 hooks are adapters to it.

    Messages are laid out by parameter name. What a method does not send is kept as error feedback: fp32, each worker's own,
    added to the next gradient. When any worker's gradients are not finite, nothing of the step is kept on any worker, and
    all results are NaN. A parameter whose gradient is zero on all workers counts as unused: its result is zero, and its
    error feedback waits.

    Args:
        settings: See `Settings`.
        group: A process group (default: all processes, or this one alone) or a `Transport`.

    >>> from pufferfish.compression import BFloat16
    >>> Engine(Settings(BFloat16())).average({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """

    def __init__(self, settings: Settings, group: dist.ProcessGroup | Transport | None = None) -> None:
        self.machine = machine_for(settings.hierarchy, group)
        if self.machine is not None:
            self.transport: Transport = self.machine.between
        else:
            self.transport = group if isinstance(group, Transport) else Group(group)
        #: Whether this worker compresses and exchanges: with a hierarchy one of each machine, otherwise all.
        self.leads = self.machine is None or self.machine.leads
        inside = (self.machine.size, self.machine.worker) if self.machine else (1, 0)
        self.state = State(self.transport.worker, self.transport.size, *inside)
        self._layout: Layout | None = None
        self._agreed: dict[str, Any] | None = None  # what `average` was last given, the same on all workers
        self._arranged: list[Any] | None  # what the layout is for; None: it is out of date
        self._used_before: bool  # whether these settings have been used in a step
        self.use(settings)

    @property
    def steps(self) -> int:
        """Number of steps so far, finite or not."""
        return self.state.steps

    @property
    def meter(self) -> Meter:
        """Bytes and times so far."""
        return self.transport.meter

    def use(self, settings: Settings) -> None:
        """Change method or error feedback from the next step on; make the same call on all workers.

        What the old method has not sent becomes error feedback of the new one, or, if the new one has none, is sent with
        the next gradient. Other state of the old method is dropped.
        """
        self.settings, self._arranged, self._used_before = settings, None, False
        methods = list(settings.by_pattern.values())
        overlap = settings.overlap
        if overlap is None:
            flat = settings.scope == "layer" and self.machine is None
            overlap = flat and all(method.elementwise for method in methods)
        #: Size of the buckets that are sent during the backward pass; None: everything is sent after it.
        self.overlap_bytes = BUCKET if overlap else None
        #: Whether loss scale and learning rate matter, to rescale kept state or to a method; if not, `units` may be omitted.
        self.keeps_units = any(
            isinstance(m, Accordion) or m.in_units or m.in_scale or settings.has_error_feedback(m)
            for m in methods
        )

    def average(
        self, gradients: Mapping[str, Tensor], units: Mapping[str, float] | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        """Return the mean over the workers, by name, in the gradients' shapes and dtypes.

        Call it on all workers, each time with all parameters: the state of a missing one is dropped. Names, shapes and
        dtypes must be the same on all of them: they are compared whenever they change, in messages that are not metered.

        Args:
            gradients: This worker's, by parameter name.
            units: Loss scale over learning rate, by name, 0 where unknown. When it changes, error feedback is multiplied by
                new/old.
            scale: Loss scale, to which momenta are rescaled.
        """
        self._agree(gradients)
        means = {name: torch.empty_like(g) for name, g in gradients.items()}
        if any(g.numel() for g in gradients.values()):
            self.arrange(gradients)
            step = self.begin(units, scale)
            step.add(gradients)
            step.finish(means)
            step.commit()
        return means

    def _agree(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise ValueError on all workers if any of them averages other names, shapes or dtypes.

        Messages hold no names: they would be averaged with each other, and other sizes end a process in gloo. The hooks
        and torchft, which do not call `average`, have compared the models.
        """
        layout = {name: [str(g.dtype).removeprefix("torch."), list(g.shape)] for name, g in gradients.items()}
        if layout == self._agreed:
            return
        device = next((g.device for g in gradients.values()), torch.device("cpu"))

        def compare(transport: Transport) -> None:
            if transport.group is None:  # a single process, or simulated workers
                return
            for theirs in Workers(transport.group, device, "Engine.average").gather(lambda: layout):
                for name in [*layout, *theirs]:
                    if layout.get(name) != theirs.get(name):
                        here, there = (
                            "{} of shape {}".format(*x[name]) if name in x else "missing"
                            for x in (layout, theirs)
                        )
                        raise ValueError(
                            f"Engine.average: {name} is {here} on this worker and {there} on another; average the same "
                            "model, with the same parameter names, on all workers"
                        )

        if self.machine is None:
            compare(self.transport)
        else:
            inside = Workers(self.machine.inside.group, device, "Engine.average")
            inside.run_on_all(lambda: compare(self.transport))
            compare(self.machine.inside)
        self._agreed = layout

    def arrange(self, like: Mapping[str, Tensor], bucket_bytes: int | None = None) -> None:
        """Lay out messages for gradients of the shapes, dtypes and device of `like`, in the order of their use.

        Buckets are filled in the given order; inside a bucket the order is that of names. Does nothing if nothing changed.
        """
        arranged = [bucket_bytes, *((name, g.shape, g.dtype, g.device) for name, g in like.items())]
        if arranged == self._arranged:
            return
        device = next(iter(like.values())).device
        for name, g in like.items():
            if not g.is_floating_point() or g.device != device:
                raise ValueError(
                    f"{name}: its gradient is {g.dtype} on {g.device}; all gradients must be floating-point on {device}"
                )
        # later, a switch may have renamed parameters
        if not self._used_before and self.state.resumed is None:
            self.settings.check_patterns(like)
        kept = self.state.named()
        parts = [
            make_batches(self.settings, {name: like[name] for name in names}, kept)
            for names in make_buckets(like, bucket_bytes)
        ]
        batches = [batch for part in parts for batch in part]
        self.state.check_resumed(batches)
        self._arranged, self._used_before = arranged, True
        names = [[name for batch in part for name in batch.names] for part in parts]
        self._layout = Layout(
            parts,
            batches if self.leads else [],
            {batch: i for i, batch in enumerate(batches, 1)},
            {i: some for i, some in enumerate(names) if some},
            device,
        )
        self.state.arrange(self._layout.own, device)

    def rearrange(self, like: Mapping[str, Tensor]) -> None:
        """Lay out messages anew, as `arrange` did, because a policy has chosen another method for some tensors."""
        assert self._arranged is not None
        (bucket_bytes, *arranged), self._arranged = self._arranged, None
        self.arrange({name: like[name] for name, *_ in arranged if name in like}, bucket_bytes)

    def begin(self, units: Mapping[str, float] | None = None, scale: float = 1.0) -> Step:
        """Start a step whose gradients arrive one by one: `add` them, then `finish` and `commit`."""
        layout, state, settings = self._layout, self.state, self.settings
        assert layout is not None, "call arrange before the first step"
        if (units and units != state.units) or scale != state.scale:
            state.rescale(units or {}, scale)
        contexts = {}
        for batch in layout.own:
            batch.lent = 0
            contexts[batch] = StepContext(
                worker=self.transport.worker,
                size=self.transport.size,
                step=state.steps,
                names=batch.names,
                dtype=batch.dtype,
                device=layout.device,
                seed=settings.seed,
                exchange=settings.exchange,
                error_feedback=batch.error_feedback,
                state=dict(batch.state),
                empty=batch.empty,
            )
        missing = {i: set(names) for i, names in layout.waits_for.items()}
        return Step(self, layout, contexts, missing, Exchange(self.transport), self.transport.meter)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, by parameter name. Every worker has its own error feedback: save it on all workers."""
        return self.state.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Continue from a saved state; see `State.load_state_dict`."""
        if shapes is None and self._arranged is not None:
            shapes = {name: shape for name, shape, _, _ in self._arranged[1:]}
        self.state.load_state_dict(state, shapes)
        self._arranged, self._layout = None, None


@dataclass(eq=False)
class Step:
    """One exchange in progress, made by `Engine.begin`. Gradients arrive in any order; a part is sent once complete."""

    engine: Engine
    layout: Layout
    contexts: dict[Batch, StepContext]
    missing: dict[int, set[str]]  # names of the gradients that each part waits for
    exchange: Exchange
    meter: Meter
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)  # of the gradients in each part
    finite: Tensor = field(init=False)  # whether all gradients are finite on all workers
    used: dict[Batch, Tensor] = field(init=False)  # which parameters have a gradient on any worker

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add some gradients. Each part's first messages are sent as soon as all of its gradients are there."""
        device = self.layout.device
        with self.meter.working(), torch.autocast(device.type, enabled=False):
            self.gradients |= {name: g for name, g in gradients.items() if g.numel()}
            for names in self.missing.values():
                names.difference_update(gradients)
            for i in [i for i, names in self.missing.items() if not names]:
                del self.missing[i]
                self._start(i)

    def advance(self) -> bool:
        """Wait for the messages in flight and send the next ones. False: there are none left."""
        device = self.layout.device
        with torch.no_grad(), self.meter.working(), torch.autocast(device.type, enabled=False):
            return self.exchange.advance()

    @torch.no_grad()
    def finish(self, out: Mapping[str, Tensor]) -> None:
        """Complete the exchange and write the means into `out`. Nothing is kept before `commit`."""
        if self.missing:
            missing = sorted(set().union(*self.missing.values()))
            raise ValueError(
                f"these parameters had gradients in the previous step but not in this one: {', '.join(missing)}"
            )
        engine, device = self.engine, self.layout.device
        with self.meter.working(), torch.autocast(device.type, enabled=False):
            while self.exchange.advance():
                pass
            if engine.leads:
                self._write(out)
            if engine.machine is not None:
                engine.machine.broadcast({name: out[name] for name in self.gradients})
        size = engine.transport.size * (engine.machine.size if engine.machine else 1)
        self.meter.step(sum([g.nbytes for g in self.gradients.values()]), size)
        engine.state.steps += 1
        engine.state.resumed = None

    @torch.no_grad()
    def commit(self, ok: Tensor | None = None) -> None:
        """Keep error feedback and the methods' state, of a step that is finite on all workers and `ok` elsewhere too."""
        if not self.engine.leads:
            return
        finite, used = self.finite, self.used
        if ok is not None:
            finite, used = finite & ok, {batch: flags & ok for batch, flags in used.items()}
        for batch, context in self.contexts.items():
            mean, rest = self.exchange.results[self.layout.number[batch]]
            batch.watch(mean, context.state, self.engine.state.units)
            batch.commit(context.state, rest, finite, used[batch])
        if any(isinstance(batch.policy, Accordion) and batch.changes() for batch in self.contexts):
            self.engine.rearrange(self.gradients)

    def _start(self, i: int) -> None:
        """Send the first messages of a part whose gradients are complete: those of zeros if they are not finite."""
        device, gradients, norms = self.layout.device, self.gradients, dict[str, Tensor]()
        if self.engine.machine is not None:  # then all are in one part
            gradients = self.engine.machine.average(gradients)
            if not self.engine.leads:
                return
        xs = self._fill(self.layout.parts[i], gradients, norms)
        self.norms[i] = torch.stack([norms[name] for name in self.layout.waits_for[i]]).float()
        bad = ~(self.norms[i] <= _LIMIT).all()
        if device.type != "cpu" or bad:  # asking a GPU would mean to wait for it
            for x in xs.values():
                x.masked_fill_(bad, 0)
        generators = {}
        for batch, x in xs.items():
            steps = batch.method.compress(x, self.contexts[batch])
            if not isinstance(steps, Generator):
                raise TypeError(f"{type(batch.method).__name__}.compress must yield the messages it sends")
            generators[self.layout.number[batch]] = steps
        if self.missing:
            self.exchange.start(generators)
            return
        # The last part: agree how many workers have gradients that are not finite, and how many use each parameter.
        all_norms = torch.cat([self.norms[j] for j in self.layout.waits_for])
        flags = torch.cat([~(all_norms <= _LIMIT).all()[None], all_norms > 0]).float()
        if len(self.layout.waits_for) == 1:
            self.exchange.start({0: _agreement(flags)} | generators)
        else:  # in a message of its own: which part is last may differ
            self.exchange.start(generators)
            self.exchange.start({0: _agreement(flags)})

    def _fill(
        self, part: Sequence[Batch], gradients: Mapping[str, Tensor], norms: dict[str, Tensor]
    ) -> dict[Batch, Tensor]:
        """Copy gradients into batches and add error feedback. Norms that are missing are added to `norms`."""
        xs = {batch: self.contexts[batch].empty(batch.shape, batch.precision) for batch in part}
        copied = []
        for batch, x in xs.items():
            if batch.error is None or x.device.type != "cpu" or batch.dtype != batch.precision:
                copied.append(batch)
                continue
            for name, place, error in zip(batch.names, batch.split(x), batch.split(batch.error), strict=True):
                if name not in norms:  # here, where the next line finds the gradient in the cache
                    norms[name] = torch.linalg.vector_norm(gradients[name])
                torch.add(gradients[name], error, out=place)  # one pass over memory less than below
        for dtype in {batch.dtype for batch in copied}:  # one call for all of a dtype
            some = [batch for batch in copied if batch.dtype == dtype]
            names = [name for batch in some for name in batch.names]
            given = [gradients[name] for name in names]
            if names[0] not in norms:
                precision = torch.promote_types(dtype, torch.float32)
                norms.update(zip(names, torch._foreach_norm(given, 2, dtype=precision), strict=True))
            torch._foreach_copy_([place for batch in some for place in batch.split(xs[batch])], given)
            errors = [(xs[batch], batch.error) for batch in some if batch.error is not None]
            if errors:
                torch._foreach_add_([x for x, _ in errors], [error for _, error in errors])
        return xs

    def _write(self, out: Mapping[str, Tensor]) -> None:
        """Write the means into `out`: zeros for unused parameters, NaN or zeros for a step that is not finite."""
        results, layout = self.exchange.results, self.layout
        counts = results[0][0]
        self.finite = counts[0] == 0
        used = self.finite & (counts[1:] > 0)
        sizes = [len(batch.names) for batch in layout.number]
        self.used = dict(zip(layout.number, used.split(sizes), strict=True))
        bad = 0.0 if self.engine.settings.nonfinite == "zero" else torch.nan
        nonfinite = torch.where(self.finite, 0.0, bad)
        means: dict[str, Tensor] = {}
        for batch in self.contexts:
            mean, rest = results[layout.number[batch]]
            mask = self.finite if batch.zeros_stay_zero else self.used[batch]
            if isinstance(mean, tuple):
                # 0 · left is 0, NaN · left is NaN
                right = batch.where(mask, mean[1], nonfinite.to(mean[1].dtype))
                if layout.device.type == "cpu" and batch.dtype == right.dtype:
                    batch.multiply(mean[0], right, [out[name] for name in batch.names])
                    continue
                mean = torch.bmm(mean[0], right)
            for what, x in (("mean", mean), *([("rest", rest)] if batch.error_feedback else [])):
                if x is None or x.shape != batch.shape:
                    raise ValueError(
                        f"{batch.method!r}.compress must return a {what} of the shape {batch.shape} of x"
                    )
            mean = batch.where(mask, mean, nonfinite.to(mean.dtype))
            if rest is not None and batch.error_feedback and batch.dtype != batch.precision:
                rest += mean - mean.to(batch.dtype)  # what rounding the result loses, on all workers alike
            means.update(zip(batch.names, batch.split(mean), strict=True))
        if means:
            torch._foreach_copy_([out[name] for name in means], list(means.values()))


def _agreement(flags: Tensor) -> MessageGenerator:
    return (yield Sum(flags)), None
