"""`CostModel`: predicts the time of a training step from its computation, its messages and the link."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .link import WIRE_FACTOR, Link, interpolate
from .local_exchange import LocalExchange

_MIN_PACE = 0.1  # lower bound of the compute speed beside a message, as a fraction of the full speed


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
    local: LocalExchange | None = (
        None  # local steps: an exchange once in several steps, instead of `messages`
    )
    #: (fraction of the gradient bytes, fraction of backward after which they are available), from (0, 0) to (1, 1).
    gradient_curve: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))

    def accumulated(self, batches: int) -> Work:
        """Return the work of one update over `batches` batches, of which only the last is followed by an exchange.

        >>> Work(forward=1.0, backward=2.0).accumulated(3)
        Work(forward=7.0, backward=2.0, ...)
        """
        forward = batches * self.forward + (batches - 1) * self.backward
        return dataclasses.replace(self, forward=forward, data=batches * self.data)


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
        return sum((self.data, self.forward, self.backward, self.optimizer)) / self.step

    @property
    def step(self) -> float:
        """Seconds of the whole step: the sum of its parts."""
        before, after = (self.data, self.forward, self.backward), (self.decode, self.optimizer)
        return sum((*before, self.encode, self.exchange, *after))


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
                pace = max(_MIN_PACE, 1 - self.link.contention * WIRE_FACTOR[kind](size) * nbytes / seconds)
            if done + pace * seconds >= compute and compute_end is None:
                compute_end = clock + (compute - done) / pace
            clock, done = clock + seconds, min(compute, done + pace * seconds)
        compute_end = clock + compute - done if compute_end is None else compute_end
        return max(clock, compute_end), compute_end

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

    def without_contention(self, work: Work) -> Work:
        """Return `work`, whose backward was measured while messages were sent, as it would be without them.

        >>> link = Link.nominal(bandwidth=1e9, latency=0, size=2)
        >>> model = CostModel(link=dataclasses.replace(link, contention=2e-9))
        >>> work = Work(forward=0.1, backward=0.2, messages=(("all_reduce", 10**7),) * 2, overlaps=True)
        >>> measured = dataclasses.replace(work, backward=model.predict(work).backward)
        >>> measured.backward > 0.2, round(model.without_contention(measured).backward, 6)
        (True, 0.2)
        """
        low, high = 0.0, work.backward
        for _ in range(40):
            middle = (low + high) / 2
            slower = self.predict(dataclasses.replace(work, backward=middle)).backward > work.backward
            low, high = (low, middle) if slower else (middle, high)
        return dataclasses.replace(work, backward=high)
