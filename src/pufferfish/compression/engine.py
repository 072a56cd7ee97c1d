"""`Engine`: one worker's part in averaging named gradients, by any method, with error feedback where it needs some."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ..distributed.workers import Workers
from .exchange import Exchange, Group, Machine, Meter, Transport, all_reduce
from .method import Mean, Method, StepContext
from .methods.accordion import Accordion
from .methods.powersgd import row_blocks
from .methods.sums import NoCompression
from .settings import Settings, make_buckets
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
        self.machine = None if settings.hierarchy == "flat" else Machine(group)
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
            overlap = flat and all(method.layout == "row" for method in methods)
        #: Size of the buckets that are sent during the backward pass; None: everything is sent after it.
        self.overlap_bytes = BUCKET if overlap else None
        #: Whether loss scale and learning rate matter, to rescale kept state or to a method; if not, `units` may be omitted.
        self.keeps_units = any(
            isinstance(m, Accordion)
            or m.keys("units")
            or m.keys("loss scale")
            or settings.has_error_feedback(m)
            for m in methods
        )

    def average(
        self, gradients: Mapping[str, Tensor], units: Mapping[str, float] | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        """Return the mean over the workers, by name, in the gradients' shapes and dtypes.

        Call it on all workers, each time with all parameters: the state of a missing one is dropped. Names, shapes and
        dtypes must be the same on all of them: they are compared whenever they change, in messages that are not metered.
        Where they change on some workers only, all of them end with an error at the time-out of the process group.

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
        group = self.transport.group if self.machine is None else self.machine.everyone
        # of simulated workers, only this one
        for theirs in Workers(group, device, "Engine.average").gather(lambda: layout):
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
        layout = Layout(parts, device)
        self.state.check_resumed(list(layout.number))
        self._arranged, self._used_before, self._layout = arranged, True, layout
        self.state.arrange(list(layout.number) if self.leads else [], device)

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
        for batch in state.batches:
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
            size = engine.transport.size * (engine.machine.size if engine.machine else 1)
            self.meter.step(sum([g.nbytes for g in self.gradients.values()]), size)
            if engine.leads:
                self._write(out)
            if engine.machine is not None:
                engine.machine.broadcast({name: out[name] for name in self.gradients})
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
        device, gradients = self.layout.device, self.gradients
        if self.engine.machine is not None:  # then all are in one part
            gradients = self.engine.machine.average(gradients)
            if not self.engine.leads:
                return
        xs, norms = self._fill(self.layout.parts[i], gradients)
        self.norms[i] = torch.stack([norms[name] for name in self.layout.waits_for[i]]).float()
        bad = ~(self.norms[i] <= _LIMIT).all()
        if device.type != "cpu" or bad:  # asking a GPU would mean to wait for it
            for x in xs.values():
                x.masked_fill_(bad, 0)
        generators = {}
        for batch, x in xs.items():
            generator = batch.method.compress(x, self.contexts[batch])
            if not isinstance(generator, Generator):
                name = type(batch.method).__name__
                raise TypeError(f"{name}.compress is not a generator; yield Sum, Gather or Scatter messages")
            generators[self.layout.number[batch]] = generator
        if self.missing:
            self.exchange.start(generators)
            return
        # The last part: agree how many workers have gradients that are not finite, and how many use each parameter.
        all_norms = torch.cat([self.norms[j] for j in self.layout.waits_for])
        flags = torch.cat([~(all_norms <= _LIMIT).all()[None], all_norms > 0]).float()
        if len(self.layout.waits_for) == 1:
            self.exchange.start({0: all_reduce(flags)} | generators)
        else:  # in a message of its own: which part is last may differ
            self.exchange.start(generators)
            self.exchange.start({0: all_reduce(flags)})

    def _fill(
        self, part: Sequence[Batch], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[Batch, Tensor], dict[str, Tensor]]:
        """Copy gradients into batches and add error feedback. Also returns the norm of each gradient."""
        xs: dict[Batch, Tensor] = {}
        norms: dict[str, Tensor] = {}
        copied: dict[torch.dtype, list[Batch]] = {}
        for batch in part:
            x = xs[batch] = self.contexts[batch].empty(batch.shape, batch.precision)
            if batch.error is None or x.device.type != "cpu" or batch.dtype != batch.precision:
                copied.setdefault(batch.dtype, []).append(batch)
                continue
            for name, place, error in zip(batch.names, batch.split(x), batch.split(batch.error), strict=True):
                norms[name] = torch.linalg.vector_norm(gradients[name])
                # while the gradient is in the cache; one pass over memory less than below
                torch.add(gradients[name], error, out=place)
        for dtype, some in copied.items():  # one call for all of a dtype
            places: dict[str, Tensor] = {}
            for batch in some:
                places.update(zip(batch.names, batch.split(xs[batch]), strict=True))
            given = [gradients[name] for name in places]
            precision = torch.promote_types(dtype, torch.float32)
            norms.update(zip(places, torch._foreach_norm(given, 2, dtype=precision), strict=True))
            torch._foreach_copy_(list(places.values()), given)
            errors = [(xs[batch], batch.error) for batch in some if batch.error is not None]
            if errors:
                torch._foreach_add_([x for x, _ in errors], [error for _, error in errors])
        return xs, norms

    def _write(self, out: Mapping[str, Tensor]) -> None:
        """Write the means into `out`: zeros for unused parameters, NaN or zeros for a step that is not finite."""
        results, layout = self.exchange.results, self.layout
        counts = results[0][0]
        self.finite = counts[0] == 0
        used = self.finite & (counts[1:] > 0)
        self.used = dict(zip(layout.number, used.split(layout.sizes), strict=True))
        bad = {"zero": 0.0, "nan": torch.nan}[self.engine.settings.nonfinite]
        nonfinite = torch.where(self.finite, 0.0, bad)
        means: dict[str, Tensor] = {}
        for batch in self.contexts:
            mean, rest = results[layout.number[batch]]
            mask = self.finite if batch.zeros_stay_zero else self.used[batch]
            if isinstance(mean, tuple):
                # 0 · left is 0, NaN · left is NaN
                right = batch.where(mask, mean[1], nonfinite.to(mean[1].dtype))
                if layout.device.type == "cpu" and batch.dtype == right.dtype:
                    batch.multiply(mean[0], right, out)
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


def make_batches(
    settings: Settings,
    gradients: Mapping[str, Tensor],
    kept: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> list[Batch]:
    """Group gradients by method, layout and dtype, in the order of their names; empty ones are left out.

    `kept`: the state of each parameter, by which an `Accordion` chooses.

    >>> from pufferfish.compression import TopK
    >>> g = {"a": torch.ones(8, 4), "b": torch.ones(4, 8), "c": torch.ones(4)}
    >>> [(b.method, b.names) for b in make_batches(Settings(TopK(), smallest=10), g)]
    [(TopK(k=0.01, sample=1.0), ('a', 'b')), (NoCompression(), ('c',))]
    """
    groups: dict[tuple[Method, Method, bool, Any, torch.dtype], list[str]] = {}
    for name, policy in settings.choose(sorted(gradients)).items():
        shape = gradients[name].shape
        if shape.numel() == 0:
            continue
        if not settings.compresses(policy, shape):
            policy = NoCompression()
        method = policy
        if isinstance(policy, Accordion):
            method = policy.choose(bool((kept or {}).get(name, {}).get("light", True)))
        row = policy.layout == "row" or settings.scope == "global"
        form = None if row else (shape[0], shape.numel()) if method.layout == "matrices" else shape.numel()
        groups.setdefault((method, policy, row, form, gradients[name].dtype), []).append(name)
    return [
        Batch(
            method=method,
            policy=policy,
            error_feedback=settings.has_error_feedback(method),
            row=row,
            names=tuple(names),
            shapes=tuple(gradients[name].shape for name in names),
            dtype=dtype,
            device=gradients[names[0]].device,
        )
        for (method, policy, row, _, dtype), names in groups.items()
    ]


@dataclass(frozen=True)
class Layout:
    """Batches that are sent together, fixed until the gradients or the settings change."""

    parts: list[list[Batch]]  # buckets
    device: torch.device

    @cached_property
    def number(self) -> dict[Batch, int]:
        """Batch → its key in `Exchange`; 0 is the sum of the flags "not finite" and "used"."""
        return {batch: i for i, batch in enumerate((batch for part in self.parts for batch in part), 1)}

    @cached_property
    def sizes(self) -> list[int]:
        """Number of parameters of each batch."""
        return [len(batch.names) for batch in self.number]

    @cached_property
    def waits_for(self) -> dict[int, list[str]]:
        """Part → gradients that must all be there before it is sent."""
        names = [[name for batch in part for name in batch.names] for part in self.parts]
        return {i: some for i, some in enumerate(names) if some}


@dataclass(eq=False)  # as a key of dicts it would hash all its names and shapes many times a step
class Batch:
    """Parameters that go through one call of a method, as rows of equal shape or all in one row."""

    method: Method
    policy: Method  # that of the settings; an `Accordion` chooses `method` for each of its tensors
    error_feedback: bool
    row: bool  # one after the other in a single row: elementwise methods, global scope
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    #: Error feedback: the part of earlier gradients that was not sent, in the layout of x. None: nothing yet.
    error: Tensor | None = None
    #: The method's own state, in its layout.
    state: dict[str, Tensor] = field(default_factory=dict)
    _scratch: list[Tensor] = field(default_factory=list)  # memory that `empty` lends in every step
    lent: int = 0  # tensors that `empty` has lent in this step

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor passed to `compress`."""
        b, first = len(self.names), self.shapes[0]
        if self.row:
            return 1, sum(self.sizes)
        return (b, first[0], first[1:].numel()) if self.method.layout == "matrices" else (b, first.numel())

    @cached_property
    def precision(self) -> torch.dtype:
        """Dtype of the tensor passed to `compress`."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def zeros_stay_zero(self) -> bool:
        """Whether the mean of all-zero gradients is zero in any case."""
        return self.method.kind in ("exact", "rounding")

    @cached_property
    def _meta(self) -> list[Tensor]:
        return [torch.empty(shape, device="meta") for shape in self.shapes]

    @cached_property
    def _sizes_on(self) -> dict[torch.device, Tensor]:
        return {}  # copied to a device once: a copy would wait for it

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory for this step. A CPU reuses that of the last step: page faults cost more than copies."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.lent == len(self._scratch):
            self._scratch.append(torch.empty(0, dtype=torch.uint8))
        if len(self._scratch[self.lent]) < nbytes:
            self._scratch[self.lent] = torch.empty(nbytes, dtype=torch.uint8)
        self.lent += 1
        return self._scratch[self.lent - 1][:nbytes].view(dtype).view(tuple(shape))

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of x, in the layout of `shape`, one for each parameter, in its shape."""
        if self.row or x.is_contiguous():  # one call: views made one by one took a third of a plain step
            return list(_unflatten_dense_tensors(x.view(-1), self._meta))
        return [piece.reshape(shape) for piece, shape in zip(x.unbind(0), self.shapes, strict=True)]

    def where(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """`new` where `mask` (one flag, or one for each parameter) is true, else `old`."""
        if new is old or (mask.device.type == "cpu" and bool(mask.all())):
            return new  # saves a pass; on a GPU reading the mask would cost more
        if mask.dim() == 1 and self.row:
            if mask.device not in self._sizes_on:
                self._sizes_on[mask.device] = torch.tensor(self.sizes, device=mask.device)
            mask = mask.repeat_interleave(self._sizes_on[mask.device], output_size=new.numel())
        elif mask.dim() == 1:
            mask = mask.view(-1, *[1] * (new.dim() - 1))
        return torch.where(mask, new, old)

    def multiply(self, left: Tensor, right: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write the products of two thin factors, (b, m, r) and (b, r, n), into tensors of `out`, on a CPU.

        It takes one pass over memory less than a product that is copied.
        """
        _, m, n = self.shape
        for first, second, name in zip(left.contiguous().split(1), right, self.names, strict=True):
            x = out[name]
            target = x.view(1, m, n) if x.is_contiguous() else x.new_empty(1, m, n)
            for place, some in row_blocks(target, first):
                torch.bmm(some, second.expand(len(place), -1, -1), out=place)
            if not x.is_contiguous():
                x.copy_(target.view(x.shape))

    def watch(self, mean: Mean, state: dict[str, Tensor], units: Mapping[str, float]) -> None:
        """Let the policy, if there is one, note the means of a step in the state that is to be kept."""
        if isinstance(self.policy, Accordion):
            mean = torch.bmm(*mean) if isinstance(mean, tuple) else mean
            self.policy.watch(mean.to(self.precision), state, [units.get(name, 0.0) for name in self.names])

    def changes(self) -> bool:
        """Whether the policy, an `Accordion`, has chosen another method for any of the parameters."""
        assert isinstance(self.policy, Accordion)
        lights = self.state["light"].tolist() if "light" in self.state else ()
        return any(self.policy.choose(light) != self.method for light in lights)

    def commit(self, state: Mapping[str, Tensor], rest: Tensor | None, ok: Tensor, used: Tensor) -> None:
        """Keep a step's state and error feedback: nothing if not `ok`, and only of the parameters in `used`.

        `rest` may lie in memory that the next step overwrites. Never waits for the device, except when there is something
        to keep for the first time.
        """
        old = self.error
        if rest is None or not self.error_feedback:
            if old is not None:  # left by another method, and sent with this step
                left = self.where(used, torch.zeros_like(old), old)
                self.error = left if bool(left.any()) else None
        elif old is None:
            self.error = self.where(used, rest.clone(), torch.zeros_like(rest))
        elif (new := self.where(used, rest, old)) is not rest:
            self.error = new
        elif (
            self._scratch
            and self._scratch[0].data_ptr() == rest.data_ptr()
            and self._scratch[0].nbytes == rest.nbytes
        ):
            # rest is x itself: swap their memory instead of copying
            self.error, self._scratch[0] = rest, old.view(-1).view(torch.uint8)
        else:
            old.copy_(rest)
        for key, value in state.items():
            known = self.state.get(key)
            if known is not None and known.shape == value.shape:
                self.state[key] = self.where(used, value, known)
            elif bool(ok):  # new state: that of unused parameters is zero if it accumulates gradients
                fresh = key in self.method.keys("units")
                self.state[key] = self.where(used, value, torch.zeros_like(value)) if fresh else value

    def stack(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """State of each parameter in the method's layout; None if it does not fit there."""
        if all(x.shape == shape for x, shape in zip(tensors, self.shapes, strict=True)):
            if self.row:
                return torch.cat([x.reshape(-1) for x in tensors])[None]
            return torch.stack([x.reshape(self.shape[1:]) for x in tensors])
        if self.row or any(x.shape != tensors[0].shape for x in tensors):
            return None
        return torch.stack(list(tensors))

    def unstack(self, state: Tensor) -> list[Tensor]:
        """State for each parameter; in its shape where state has the shape of x."""
        if state.shape == self.shape:
            return self.split(state)
        assert not self.row, f"{self.method}: state of tensors in one row must have the shape of x"
        return list(state.unbind(0))
