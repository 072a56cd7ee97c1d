"""`Exchange`: one worker's messages, packed into few collectives, sent by a `Transport` and counted by a `Meter`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..distributed.workers import lost_contact
from .method import Gather, Message, MessageGenerator, Scatter, Sum

T = TypeVar("T")
#: A collective in flight: call it to wait for the result.
Pending = Callable[[], T]
#: A collective that was started: a function that waits for it, and the result, valid after that.
Started = tuple[Callable[[], object], T]
#: A tensor of at least so many bytes is a message of its own: packing would copy it and saves little.
LARGE = 2**20
#: Bytes that a worker sends when each of p workers gives b bytes to a collective, by the ring algorithms.
WIRE: dict[str, Callable[[float, int], float]] = {
    "all_reduce": lambda b, p: 2 * b * (p - 1) / p,
    "all_gather": lambda b, p: b * (p - 1),
    "all_to_all": lambda b, p: b * (p - 1) / p,
    "broadcast": lambda b, p: b * (p - 1) / p,
}
# all_gather_into_tensor, by its name in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Exchange:
    """Runs the generators of one step side by side and sends their messages of one round together.

    Generators are numbered: whatever the order in which they start, they lie in messages by number. The first messages of
    a generator are sent when it starts, with those of all that start with it; `advance` waits for the answers and sends the
    next round. All workers start the same generators together.
    """

    transport: Transport
    running: dict[int, MessageGenerator] = field(default_factory=dict)
    results: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    _in_flight: list[Pending[dict[int, Any]]] = field(default_factory=list)

    def start(self, generators: Mapping[int, MessageGenerator]) -> None:
        """Start generators and send their first messages."""
        self.running.update(generators)
        self._send(dict.fromkeys(generators))

    def advance(self) -> bool:
        """Wait for the messages in flight and send the next ones. False: none were in flight, all results are there."""
        in_flight, self._in_flight = self._in_flight, []
        answers: dict[int, Any] = {}
        for wait in in_flight:
            answers |= wait()
        self._send(answers)
        return bool(in_flight)

    def _send(self, answers: Mapping[int, Any]) -> None:
        """Give the generators their answers and send what they yield next: sums, then gathers, then scatters."""
        messages: dict[type, dict[int, Any]] = {Sum: {}, Gather: {}, Scatter: {}}
        for i in sorted(answers):
            generator: Any = self.running[i]
            try:
                message: Message = generator.send(answers[i])
            except StopIteration as end:
                if not (isinstance(end.value, tuple) and len(end.value) == 2):
                    raise TypeError(
                        f"{generator.__qualname__} must return two values, the mean and the rest; "
                        "the rest is None for a method without error feedback"
                    ) from None
                self.results[i] = end.value
                continue
            if type(message) not in messages:
                raise TypeError(
                    f"{generator.__qualname__} yields a {type(message).__name__}; yield Sum(tensor), Gather(tensors) "
                    "or Scatter(pieces)"
                )
            messages[type(message)][i] = message
        if messages[Sum]:
            self._in_flight += _send_sums({i: m.tensor for i, m in messages[Sum].items()}, self.transport)
        if messages[Gather]:
            self._in_flight += _send_tuples(
                {i: (m.tensors,) for i, m in messages[Gather].items()}, self.transport, owners=False
            )
        if messages[Scatter]:
            self._in_flight += _send_tuples(
                {i: m.pieces for i, m in messages[Scatter].items()}, self.transport, owners=True
            )


def all_reduce(x: Tensor) -> MessageGenerator:
    """A generator of one message, the sum of x."""
    return (yield Sum(x)), None


def _send_sums(tensors: Mapping[int, Tensor], transport: Transport) -> list[Pending[dict[int, Any]]]:
    """All-reduce tensors, those of one dtype together."""
    in_flight: list[Pending[dict[int, Any]]] = []
    for dtype in sorted({x.dtype for x in tensors.values()}, key=str):
        for some in _packed([(i, x.nbytes) for i, x in tensors.items() if x.dtype == dtype]):
            mine = {i: tensors[i] for i in some}
            pending = transport.sum(_flatten_dense_tensors(list(mine.values())))
            in_flight.append(
                lambda sums=pending, like=mine: dict(  # type: ignore[misc]
                    zip(like, _unflatten_dense_tensors(sums(), list(like.values())), strict=True)
                )
            )
    return in_flight


def _send_tuples(
    pieces: Mapping[int, tuple[tuple[Tensor, ...], ...]], transport: Transport, *, owners: bool
) -> list[Pending[dict[int, Any]]]:
    """Send tuples of tensors of any dtypes, as bytes: one to each owner (all-to-all), or one to all (all-gather)."""
    #: (generator, place in its tuple) → a tensor for each owner, or for all
    tensors = {(i, j): xs for i, piece in pieces.items() for j, xs in enumerate(zip(*piece, strict=True))}
    answers: dict[int, list[tuple[Tensor, ...]]] = {i: [()] * transport.size for i in pieces}

    def send(some: list[tuple[int, int]]) -> Pending[dict[int, Any]]:
        sent = [_as_bytes(list(mine)) for mine in zip(*(tensors[key] for key in some), strict=True)]
        pending = transport.scatter(sent) if owners else transport.gather(sent[0])
        like = [tensors[key][transport.worker if owners else 0] for key in some]
        return lambda: _unpacked(pending(), some, like, answers)

    sizes = [(key, sum(x.nbytes for x in xs)) for key, xs in tensors.items()]
    return [send(some) for some in _packed(sizes)]


def _packed(sizes: Sequence[tuple[T, int]]) -> list[list[T]]:
    """Which tensors share a message: every large one is alone, the others are together."""
    small = [key for key, nbytes in sizes if nbytes < LARGE]
    return [[key] for key, nbytes in sizes if nbytes >= LARGE] + ([small] if small else [])


def _unpacked(
    buffers: Sequence[Tensor],
    keys: list[tuple[int, int]],
    like: list[Tensor],
    answers: dict[int, list[tuple[Tensor, ...]]],
) -> dict[int, Any]:
    """Add the tensors in the workers' buffers to the tuples that the generators wait for."""
    for worker, buffer in enumerate(buffers):
        pieces = buffer.split([x.nbytes for x in like])
        for (i, j), piece, x in zip(keys, pieces, like, strict=True):
            if piece.storage_offset() % x.itemsize:
                piece = piece.clone()  # a number may not begin at any byte
            theirs = answers[i][worker]
            answers[i][worker] = (*theirs[:j], piece.view(x.dtype).view(x.shape), *theirs[j:])
    return {i: answers[i] for i, _ in keys}


def _as_bytes(tensors: list[Tensor]) -> Tensor:
    """Tensors of any dtypes as bytes, one after the other."""
    flat: Tensor = _flatten_dense_tensors([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
    return flat


class Transport:
    """One worker's end of three collectives on flat buffers, each metered. Subclasses implement the collectives.

    A collective starts at once; the meter counts the time that its caller waits for it.
    """

    worker: int
    size: int  # number of workers
    inside: bool = False  # whether messages never leave the machine
    group: Any = None  # the process group, if there is one
    operation = "the exchange of gradients"  # what errors name

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()

    def sum(self, buffer: Tensor) -> Pending[Tensor]:
        """Sum the workers' buffers, in place."""
        return self._metered("all_reduce", buffer.nbytes, self._sum, buffer, buffer)

    def gather(self, buffer: Tensor) -> Pending[list[Tensor]]:
        """Collect the workers' buffers, which have equal sizes."""
        return self._metered("all_gather", buffer.nbytes, self._gather, buffer, [buffer] * self.size)

    def scatter(self, pieces: list[Tensor]) -> Pending[list[Tensor]]:
        """Send `pieces[j]` to worker j and collect what all workers send here."""
        return self._metered("all_to_all", sum(x.nbytes for x in pieces), self._scatter, pieces, pieces)

    def _metered(
        self, kind: str, nbytes: int, start: Callable[[Any], Started[T]], data: Any, empty: T
    ) -> Pending[T]:
        if nbytes == 0:
            return lambda: empty
        self.meter.sent(kind, nbytes, self.size, self.inside)
        done, result = start(data)

        def wait() -> T:
            begin = time.perf_counter()
            try:
                with self.meter.waiting():
                    done()
            except RuntimeError as error:
                if self.group is None:
                    raise
                raise lost_contact(self.operation, self.group, time.perf_counter() - begin) from error
            return result

        return wait

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        raise NotImplementedError

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        raise NotImplementedError

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        raise NotImplementedError


class Group(Transport):
    """Collectives of a process group; without one, of the whole job, or of this process alone.

    >>> Group().size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None = None, meter: Meter | None = None) -> None:
        super().__init__(meter)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.size = dist.get_world_size(group) if group else 1
        self.worker = dist.get_rank(group) if group else 0

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        if self.size == 1:
            return no_wait, buffer
        return dist.all_reduce(buffer, group=self.group, async_op=True).wait, buffer

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        if self.size == 1:
            return no_wait, [buffer]
        everyone = buffer.new_empty(self.size * len(buffer))
        work = all_gather(everyone, buffer, group=self.group, async_op=True)
        return work.wait, list(everyone.split(len(buffer)))

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        if self.size == 1:
            return no_wait, pieces
        n = len(pieces[self.worker])
        sent, received = torch.cat(pieces), pieces[0].new_empty(n * self.size)
        work = dist.all_to_all_single(
            received, sent, [n] * self.size, [len(p) for p in pieces], group=self.group, async_op=True
        )
        return work.wait, list(received.split(n)) if n else [received] * self.size


def no_wait() -> None:
    """Wait for a collective of one worker."""


class Machine:
    """The workers of this machine (`inside`), and those with the same local number on all machines (`between`).

    The first worker of a machine exchanges the machine's means with those of the other machines, and gives the result
    to its own. It alone has error feedback and the method's state.

    Args:
        group: All workers (default: the whole job). torchrun started LOCAL_WORLD_SIZE of them on each machine, with
            consecutive ranks.
    """

    def __init__(self, group: dist.ProcessGroup | Transport | None) -> None:
        if isinstance(group, Transport):
            raise ValueError(f'hierarchy="node" needs process groups; {type(group).__name__} is flat')
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError('hierarchy="node" needs torch.distributed; start the job with torchrun')
        self.everyone = group or dist.group.WORLD
        world = dist.get_process_group_ranks(self.everyone)
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdigit() or int(text) < 1 or len(world) % int(text):
            raise ValueError(
                f'hierarchy="node": LOCAL_WORLD_SIZE is {text or "not set"}, which does not divide {len(world)} workers; '
                "start the job with torchrun, or set it to the number of workers on each machine"
            )
        local, rank, meter = int(text), dist.get_rank(group), Meter()
        machines = [world[i : i + local] for i in range(0, len(world), local)]
        mine, across = machines[rank // local], [machine[rank % local] for machine in machines]
        self.inside, self.between = (
            Group(dist.new_group(ranks, use_local_synchronization=True), meter) for ranks in (mine, across)
        )
        self.inside.inside = True
        self.worker, self.size = self.inside.worker, self.inside.size
        self.leads = self.worker == 0
        if self.between.size == 1 and self.size > 1 and self.leads:
            warnings.warn(
                f"hierarchy: all {self.size} workers are on one machine, so nothing is compressed; "
                'hierarchy="flat" compresses between them',
                stacklevel=3,
            )

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The machine's means, uncompressed."""
        means: dict[str, Tensor] = {}
        for some, flat in _flat(gradients):
            total = self.inside.sum(flat.div_(self.size))()  # divided first: a sum may overflow in 16 bits
            means.update(zip(some, _unflatten_dense_tensors(total, list(some.values())), strict=True))
        return means

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all workers of the machine the tensors of the first one, in place."""
        for some, flat in _flat(tensors):
            self.inside.meter.sent("broadcast", flat.nbytes, self.size, inside=True)
            with self.inside.meter.waiting():
                dist.broadcast(flat, group=self.inside.group, group_src=0)
            torch._foreach_copy_(list(some.values()), _unflatten_dense_tensors(flat, list(some.values())))


def _flat(tensors: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The tensors of each dtype, and a flat copy of them."""
    for dtype in sorted({x.dtype for x in tensors.values()}, key=str):
        some = {name: tensors[name] for name in sorted(tensors) if tensors[name].dtype == dtype}
        yield some, torch.cat([x.reshape(-1) for x in some.values()])


class Meter:
    """Counts for one worker. Times are those of the host: on a GPU, `Breakdown` times the steps.

    "encode" is the work up to a step's last exchange, "decode" the work after it. An exchange counts while the worker waits for
    it: what is hidden behind the backward pass does not. `wire_bytes` leave the machine, as far as the compression
    knows; bytes that stay inside a machine, by `hierarchy="node"`, are counted in `inside_wire_bytes`.

    >>> meter = Meter()
    >>> meter.sent("all_gather", 100, 4)
    >>> meter.messages, meter.collective_bytes["all_gather"], meter.wire_bytes
    (1, 100, 300.0)
    >>> meter.step(800, 4)
    >>> meter
    <Meter: 1 step, 300 bytes sent, 1,200 without compression>
    """

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        steps = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        sent, plain = f"{self.wire_bytes:,.0f}", f"{self.plain_wire_bytes:,.0f}"
        return f"<Meter: {steps}, {sent} bytes sent, {plain} without compression>"

    def reset(self) -> None:
        """Start counting from zero."""
        self.steps = 0
        self.messages = 0
        self.gradient_bytes = 0  # size of the gradients, uncompressed
        self.plain_wire_bytes = 0.0  # what a ring all-reduce of them would send
        self.collective_bytes = dict.fromkeys(WIRE, 0)
        self.wire_bytes = 0.0
        self.inside_wire_bytes = 0.0
        self._seconds = {"encode": 0.0, "exchange": 0.0, "decode": 0.0, "hidden": 0.0}
        self._marks: list[float] = []  # start of the work, begin and end of each exchange
        self._sent_at: float | None = None  # start of an exchange that nobody waits for yet

    def sent(self, kind: str, nbytes: int, size: int, inside: bool = False) -> None:
        """Count a collective of `size` workers, each of which gives it `nbytes`, before it starts."""
        self.messages += 1
        self.collective_bytes[kind] += nbytes
        if inside:
            self.inside_wire_bytes += WIRE[kind](nbytes, size)
        else:
            self.wire_bytes += WIRE[kind](nbytes, size)
        if self._sent_at is None:
            self._sent_at = time.perf_counter()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time work on some of a step's gradients. Work that raises is not timed."""
        self._marks = [time.perf_counter()]
        yield
        laps = [b - a for a, b in pairwise([*self._marks, time.perf_counter()])]
        self._seconds["exchange"] += sum(laps[1::2])
        self._seconds["encode"] += sum(laps[:-1:2]) if len(laps) > 1 else laps[0]
        self._seconds["decode"] += laps[-1] if len(laps) > 1 else 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for one collective."""
        self._marks.append(time.perf_counter())
        if self._sent_at is not None:
            self._seconds["hidden"] += self._marks[-1] - self._sent_at
            self._sent_at = None
        yield
        self._marks.append(time.perf_counter())

    def step(self, gradient_bytes: int, size: int) -> None:
        """Count a finished step of `size` workers with gradients of `gradient_bytes` bytes."""
        self.steps += 1
        self.gradient_bytes += gradient_bytes
        self.plain_wire_bytes += WIRE["all_reduce"](gradient_bytes, size)

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds of encode, exchange, decode and hidden."""
        return dict(self._seconds)

    def as_dict(self) -> dict[str, float]:
        """All counts and times, flat, for any logger.

        >>> Meter().as_dict()["wire_bytes"]
        0.0
        """
        return {
            "steps": self.steps,
            "messages": self.messages,
            "gradient_bytes": self.gradient_bytes,
            "plain_wire_bytes": self.plain_wire_bytes,
            **{f"{kind}_bytes": nbytes for kind, nbytes in self.collective_bytes.items()},
            "wire_bytes": self.wire_bytes,
            "inside_wire_bytes": self.inside_wire_bytes,
            **{f"{what}_seconds": seconds for what, seconds in self.seconds.items()},
        }
