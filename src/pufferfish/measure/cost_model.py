"""`CostModel`: predicts the time of a training step from its computation, its messages and the link.

The parts of `Work` are measured on one worker: the computation by `measure_compute`, compression by `dry_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compression import Engine, Methods, OneWorker, Settings
from ..layers.names import trainable_parameters
from ..local.fragments import Schedule, split_by_depth
from ..lowrank.optimizers import Optimizers
from .breakdown import PARTS, Breakdown, GradientTimeline, pause, trimmed_mean
from .link import Link, interpolate, wire_factor

#: Parts of a step that need no other worker.
COMPUTE_PARTS = ("data", "forward", "backward", "optimizer")
_MIN_PACE = 0.1  # lower bound of the compute speed beside a message, as a fraction of the full speed
_ROUNDS = 3  # of local steps, after which the waits of each round are the same
#: A dry run's timed steps take about so many seconds, between the minimum and maximum number.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 0.1, 3, 20
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """α–β model of each collective, with overlap of communication and backward.

    Without overlap a step computes, encodes, waits for all messages and decodes. With overlap the messages queue for the
    link, each once its gradients are available, and the step waits for those that are left after backward. On CPUs
    computation is slower while a message is being sent, by `Link.contention` seconds for each byte on the wire.

    With local steps a prediction is the mean of the steps of a round. Without a delay all of them wait for the whole exchange;
    with a delay, the exchange and its encoding and decoding are hidden as far as the steps until the average is applied last.

    >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),))
    >>> model = CostModel(link=Link.nominal(bandwidth=1e9, latency=0, size=2, goodput=1))
    >>> model.predict(work).step, model.predict(work, workers=4).step
    (0.38, 0.42)
    """

    link: Link

    def predict(self, work: Work, workers: int | None = None) -> Prediction:
        """Predict a step of `workers` workers (default: as many as the link was measured with)."""
        size = self.link.size if workers is None else workers
        if work.local is not None:
            return self._predict_local(work, work.local, size)
        times = self._times(work, size)
        backward, exchange, hidden = work.backward, sum(times), 0.0
        if work.overlaps and times and not work.intra_node_bytes:
            end, computed = self._overlapped(work, times, size)
            backward, exchange = computed - work.encode, end - computed
            hidden = sum(times) - min(exchange, sum(times))
        if work.buffer_bytes:
            exchange += self.link.seconds("broadcast", work.buffer_bytes, size)
        return Prediction(
            data=work.data,
            forward=work.forward,
            backward=backward,
            encode=work.encode,
            exchange=exchange,
            decode=work.decode,
            optimizer=work.optimizer,
            hidden=hidden,
        )

    def _predict_local(self, work: Work, local: LocalExchange, size: int) -> Prediction:
        """Predict the mean step of local steps."""
        h, fragments = local.schedule.h, local.fragments
        messages = [sum(self.link.seconds(kind, n, size) for kind, n in f.messages) for f in fragments]
        encode, decode = sum(f.encode for f in fragments), sum(f.decode for f in fragments)
        waited = sent = sum(messages)
        if local.schedule.delay:
            whole = [f.encode + seconds + f.decode for f, seconds in zip(fragments, messages, strict=True)]
            compute = work.data + work.forward + work.backward + work.optimizer
            waited, sent, encode, decode = local.waiting(compute, whole), sum(whole), 0.0, 0.0
        return Prediction(
            data=work.data,
            forward=work.forward,
            backward=work.backward,
            encode=encode / h,
            exchange=waited / h,
            decode=decode / h,
            optimizer=work.optimizer,
            hidden=(sent - waited) / h,
        )

    def _times(self, work: Work, size: int) -> list[float]:
        """Seconds of each message."""
        link = self.link
        if not work.intra_node_bytes:
            return [link.seconds(kind, nbytes, size) for kind, nbytes in work.messages]
        machines = size // link.per_node
        return [
            link.seconds("all_reduce", work.intra_node_bytes, scope="intra_node"),
            link.seconds("broadcast", work.intra_node_bytes, scope="intra_node"),
            *(link.seconds(kind, nbytes, machines, "inter_node") for kind, nbytes in work.messages),
        ]

    def _overlapped(self, work: Work, times: Sequence[float], size: int) -> tuple[float, float]:
        """Seconds from the start of backward to the end of the last message, and to the end of computation."""
        compute = work.backward + work.encode
        total = sum(nbytes for _, nbytes in work.messages)
        edges = list(accumulate(work.bucket_bytes)) or [0]
        clock = done = 0.0  # done: seconds of computation completed
        compute_end = None
        sent = 0
        for (kind, nbytes), seconds in zip(work.messages, times, strict=True):
            sent += nbytes
            share = sent / total
            if work.bucket_bytes:
                share = next((x for x in edges if x >= share * edges[-1] * (1 - 1e-9)), edges[-1]) / edges[-1]
            due = compute * (interpolate(work.gradient_curve, share) or 0.0)
            if done < due:
                clock, done = clock + due - done, due
            pace = 1.0
            if seconds:
                pace = max(_MIN_PACE, 1 - self.link.contention * wire_factor(kind, size) * nbytes / seconds)
            if done + pace * seconds >= compute and compute_end is None:
                compute_end = clock + (compute - done) / pace
            clock, done = clock + seconds, min(compute, done + pace * seconds)
        compute_end = clock + compute - done if compute_end is None else compute_end
        return max(clock, compute_end), compute_end

    def without_contention(self, work: Work) -> Work:
        """Return `work`, whose backward was measured while messages were sent, as it would be without them.

        >>> link = Link.nominal(bandwidth=1e9, latency=0, size=2)
        >>> model = CostModel(link=replace(link, contention=2e-9))
        >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),) * 2, overlaps=True)
        >>> measured = replace(work, backward=model.predict(work).backward)
        >>> measured.backward > 0.2, round(model.without_contention(measured).backward, 6)
        (True, 0.2)
        """
        low, high = 0.0, work.backward
        for _ in range(40):
            middle = (low + high) / 2
            slower = self.predict(replace(work, backward=middle)).backward > work.backward
            low, high = (low, middle) if slower else (middle, high)
        return replace(work, backward=high)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of a step and of its parts; the parts are those of `Breakdown`."""

    data: float
    forward: float
    backward: float
    encode: float
    exchange: float  # exposed: not hidden behind backward
    decode: float
    optimizer: float
    hidden: float  # exchange that overlaps with backward; not part of the step

    @property
    def utilisation(self) -> float:
        """Computing time over the time of the step."""
        return float(sum(getattr(self, name) for name in COMPUTE_PARTS)) / self.step

    @property
    def step(self) -> float:
        """Seconds of the whole step: the sum of its parts."""
        return float(sum(getattr(self, name) for name in PARTS))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Computation (seconds) and messages of one worker in one step, without waiting for other workers."""

    forward: float
    backward: float
    optimizer: float = 0.0
    data: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    messages: tuple[tuple[str, int], ...] = ()  # (collective, bytes passed to it), in the order they are sent
    overlaps: bool = False  # whether a message is sent as soon as its gradients are available
    #: Gradient bytes of DDP's buckets in order; a message waits for its bucket. Empty: it waits for its own gradients only.
    bucket_bytes: tuple[int, ...] = ()
    buffer_bytes: int = 0  # broadcast by DDP before forward
    #: Gradient bytes averaged inside each machine first (`hierarchy="node"`); `messages` are then between machines.
    intra_node_bytes: int = 0
    local: LocalExchange | None = None  # an exchange once in several steps, instead of `messages`
    #: (fraction of the gradient bytes, fraction of backward after which they are available), from (0, 0) to (1, 1).
    gradient_curve: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))

    def accumulated(self, batches: int) -> Work:
        """Return the work of one update over `batches` batches, of which only the last is followed by an exchange.

        >>> Work(forward=1.0, backward=2.0).accumulated(3)
        Work(forward=7.0, backward=2.0, ...)
        """
        forward = batches * self.forward + (batches - 1) * self.backward
        return replace(self, forward=forward, data=batches * self.data)


@dataclass(frozen=True)
class LocalExchange:
    """The exchange of one worker in local steps. It is assumed not to slow down the computation at the same time.

    Args:
        schedule: which fragment is sent after which update, and when it is applied.
        fragments: messages and compression time of each.

    >>> half = Traffic(messages=(("all_reduce", 1000),))
    >>> exchange = LocalExchange(Schedule(h=4, fragments=2, delay=1), (half, half))
    >>> exchange.wire_bytes(2), exchange.peak_bytes(2), exchange.waiting(1.0, [3.0, 0.5])
    (500.0, 1000.0, 2.0)
    """

    schedule: Schedule
    fragments: tuple[Traffic, ...]

    def wire_bytes(self, size: int) -> float:
        """Bytes that one of `size` workers sends for an update, on average."""
        return sum(_sent(fragment.messages, size) for fragment in self.fragments) / self.schedule.h

    def peak_bytes(self, size: int) -> float:
        """Bytes that one of `size` workers sends in the largest exchange: those of the fragments that are sent together."""
        moments: dict[int, float] = {}
        for p, fragment in enumerate(self.fragments):
            when = self.schedule.h * p // self.schedule.fragments
            moments[when] = moments.get(when, 0.0) + _sent(fragment.messages, size)
        return max(moments.values())

    def waiting(self, compute: float, seconds: Sequence[float]) -> float:
        """Seconds that a worker waits in h updates, once all rounds wait equally long.

        Args:
            compute: seconds of an update.
            seconds: that the exchange of each fragment takes. Exchanges run one after the other.
        """
        schedule, clock, link_free, waited = self.schedule, 0.0, 0.0, 0.0
        landing: dict[int, list[float]] = {}
        for update in range(1, _ROUNDS * schedule.h + 1):
            clock += compute
            for p in schedule.due(update % schedule.h):
                link_free = max(clock, link_free) + seconds[p]
                landing.setdefault(update + schedule.delay, []).append(link_free)
            wait = max([clock, *landing.pop(update, ())]) - clock
            clock += wait
            waited += wait if update > (_ROUNDS - 1) * schedule.h else 0.0
        return waited


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages and compression time of one worker in one step."""

    messages: tuple[tuple[str, int], ...]  # (collective, bytes passed to it), in the order they are sent
    encode: float = 0.0  # seconds up to the last message
    decode: float = 0.0  # seconds after the last message
    overlaps: bool = False  # whether messages are sent during the backward pass
    intra_node_bytes: int = 0  # averaged inside each machine first


def wire_bytes(work: Work, size: int, per_node: int = 1) -> float:
    """Bytes that a worker sends in a step; with a hierarchy, to other machines, as the mean of a machine's workers.

    >>> work = Work(forward=1.0, backward=1.0, messages=(("all_gather", 100),))
    >>> [wire_bytes(replace(work, intra_node_bytes=n), 16, per_node=8) for n in (0, 400)]
    [1500.0, 12.5]
    """
    if work.local is not None:
        return work.local.wire_bytes(size)
    per_node = per_node if work.intra_node_bytes else 1
    return _sent(work.messages, size // per_node) / per_node


def _sent(messages: Sequence[tuple[str, int]], size: int) -> float:
    return sum(wire_factor(kind, size) * nbytes for kind, nbytes in messages)


def measure_compute(
    model: nn.Module, step: Callable[[], object], optimizer: Optimizers = None, *, steps: int = 5
) -> Work:
    """Time `steps` calls of `step` after three untimed ones; each part is a trimmed mean in seconds.

    Args:
        model: the model that `step` calls, wrapped or not.
        step: runs forward, backward and an update. It must not communicate: run it under `no_sync`.
        optimizer: see `Breakdown`.

    >>> model = nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step() -> None:
    ...     model(torch.ones(8, 64)).sum().backward()
    ...     optimizer.step()
    >>> work = measure_compute(model, step, optimizer)
    >>> work.backward > 0, work.messages
    (True, ())
    """
    with GradientTimeline(model) as timeline:
        for _ in range(3):  # the timeline records the second
            step()
    timings: dict[str, list[float]] = {name: [] for name in (*COMPUTE_PARTS, "exchange")}
    for _ in range(steps):
        pause()
        with Breakdown(model, optimizer) as times:
            step()
        for name, seconds in timings.items():
            seconds.append(times.parts[name])
    parts: dict[str, Any] = {name: trimmed_mean(seconds) for name, seconds in timings.items()}
    parts["backward"] += parts.pop("exchange")  # under no_sync this is only the end of backward
    return Work(**parts, gradient_curve=timeline.curve())


def with_ddp_messages(work: Work, parameters: Mapping[str, Tensor], cap: int = 25) -> Work:
    """Return `work` with plain DDP's messages for the gradients of `parameters`, in buckets of `cap` MiB.

    >>> with_ddp_messages(Work(forward=1.0, backward=1.0), {"w": torch.ones(10)}).messages
    (('all_reduce', 40),)
    """
    sizes = [x.nbytes for x in reversed(list(parameters.values()))]
    return with_buckets(work, ddp_bucket_bytes(sizes, cap * _MIB))


def with_buckets(work: Work, sizes: Sequence[int]) -> Work:
    """Return `work` with one all-reduce for each of DDP's buckets of `sizes` bytes."""
    messages = tuple(("all_reduce", n) for n in sizes)
    return replace(work, messages=messages, overlaps=True, bucket_bytes=tuple(sizes))


def ddp_bucket_bytes(sizes: Iterable[int], cap: float = 25 * _MIB, first: float = _MIB) -> list[int]:
    """Bytes of DDP's buckets for gradients of `sizes` bytes, in the order they become available.

    A bucket is full at `cap` bytes, the first one at `first` bytes.

    >>> ddp_bucket_bytes([600, 600, 600, 600], cap=1000, first=500)
    [600, 1200, 600]
    """
    buckets = [0]
    limit = first
    for nbytes in sizes:
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = cap
        buckets[-1] += nbytes
    return buckets


def built_buckets(ddp: DistributedDataParallel) -> list[int]:
    """Bytes of the buckets that DDP has built, in order; it rebuilds them in the first step."""
    log = ddp._get_ddp_logging_data()
    return [int(n) for n in str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes")).split(",")]


def with_compression(
    work: Work,
    method: Methods,
    parameters: Mapping[str, Tensor],
    size: int,
    *,
    device: torch.device | None = None,
    per_node: int = 1,
) -> Work:
    """Return `work` with the messages and the compression time of `method` in DDP, from a dry run (see `dry_run`).

    >>> from pufferfish.compression import BFloat16
    >>> with_compression(Work(forward=1.0, backward=1.0), BFloat16(), {"w": torch.ones(64, 64)}, 4).messages[0]
    ('all_reduce', 8192)
    """
    traffic = dry_run(method, parameters, size, device=device, per_node=per_node)
    return replace(with_ddp_messages(work, parameters), **vars(traffic))


def with_local_exchange(
    work: Work,
    schedule: Schedule,
    method: Methods | Settings,
    parameters: Mapping[str, Tensor],
    size: int,
    device: torch.device | None = None,
) -> Work:
    """Return `work` with the averages of local steps among `size` workers, from dry runs, instead of other messages.

    >>> from pufferfish.compression import NoCompression
    >>> work = with_local_exchange(Work(forward=1.0, backward=1.0), Schedule(h=4), NoCompression(), {"w": torch.ones(8)}, 2)
    >>> work.local.fragments[0].messages  # 8 bytes say whether all values are finite
    (('all_reduce', 40),)
    """
    sizes = {name: x.numel() for name, x in parameters.items()}
    split = split_by_depth(sizes, schedule.fragments)
    runs = [dry_run(method, {n: parameters[n] for n in names}, size, device=device) for names in split]
    return replace(
        work,
        local=LocalExchange(schedule, tuple(runs)),
        messages=(),
        overlaps=False,
        bucket_bytes=(),
        buffer_bytes=0,
        encode=0.0,
        decode=0.0,
    )


def dry_run(
    method: Methods | Settings,
    like: Mapping[str, Tensor],
    size: int,
    *,
    device: torch.device | str | None = None,
    steps: int | None = None,
    per_node: int = 1,
) -> Traffic:
    """Run `method` on random gradients as one of `size` workers, without a network.

    The other workers are taken to send the same as this one, so that the work on received messages is included. The
    global random state is not used.

    Args:
        method: compression method, one per parameter pattern, or all settings; their `hierarchy` is that of `per_node`.
        like: tensors with the shapes and dtypes of the gradients, by name.
        device: where to run (default: that of the tensors).
        steps: number of timed steps after the first (default: 3 to 20, for about 0.1 s). Times are trimmed means.
            Messages are those of the last of `steps`, or of the third, so that they are equal on all workers.
        per_node: workers per machine; above 1, as `hierarchy="node"`, with the messages between machines.

    >>> from pufferfish.compression import BFloat16
    >>> traffic = dry_run(BFloat16(), {"w": torch.empty(64, 64)}, 4, steps=1)
    >>> traffic.messages[0], traffic.overlaps
    (('all_reduce', 8192), True)
    """
    here = torch.device(device) if device is not None else next(iter(like.values())).device
    generator = torch.Generator(here).manual_seed(0)
    gradients = {n: torch.empty(x.shape, dtype=x.dtype, device=here) for n, x in like.items()}
    for gradient in gradients.values():
        gradient.normal_(generator=generator)
    means = {name: torch.empty_like(g) for name, g in gradients.items()}
    worker = OneWorker(size // per_node)
    settings = replace(method, hierarchy="flat") if isinstance(method, Settings) else Settings(method)
    if per_node > 1:
        settings = replace(settings, overlap=False)
    engine = Engine(settings, worker)
    engine.arrange(gradients, engine.overlap_bytes)
    engine.state.steps = 2**20  # after the uncompressed or less compressed first steps of a method

    def step() -> tuple[float, float]:
        """Seconds to encode and to decode."""
        worker.messages.clear()
        pause()
        before = worker.meter.seconds
        exchange = engine.begin()
        exchange.add(gradients)
        exchange.finish(means)
        exchange.commit()
        after, end = worker.meter.seconds, time.perf_counter()
        torch.get_device_module(here).synchronize()
        waited = time.perf_counter() - end
        return after["encode"] - before["encode"], after["decode"] + waited - before["decode"]

    step()  # not timed
    first, least = step(), steps or _MIN_STEPS
    timings = [first, *(step() for _ in range(least - 1))]
    messages = tuple(worker.messages)
    if steps is None:
        most = min(_MAX_STEPS, int(_SECONDS / sum(first))) if sum(first) else _MAX_STEPS
        timings += [step() for _ in range(most - least)]
    encode, decode = zip(*timings, strict=True)
    return Traffic(
        messages=messages,
        encode=trimmed_mean(encode),
        decode=trimmed_mean(decode),
        overlaps=engine.overlap_bytes is not None,
        intra_node_bytes=sum(g.nbytes for g in gradients.values()) if per_node > 1 else 0,
    )


def probe_bytes(model: nn.Module) -> int:
    """Size of the largest message for `probe`: all gradients of `model`, but 256 KiB to 32 MiB.

    >>> probe_bytes(nn.Linear(1000, 1000))
    4004000
    """
    return min(max(sum(x.nbytes for x in trainable_parameters(model).values()), 2**18), 2**25)
