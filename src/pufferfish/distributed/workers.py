"""`Workers`: the processes of one group, and how they agree, share work and errors, and exchange small values."""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: Bytes of a round: the name of the operation, and what the workers tell each other.
_NAME, _PAYLOAD = 88, 40

#: The gloo group beside each group of a job, for the messages of `Workers`. torch owns both.
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)

#: Errors that keep their type on the other workers; all others become a RuntimeError there.
_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (OSError, ValueError, TypeError)}


class Workers:
    """The processes of one process group, or a single process. All of them call every method.

    Every message begins with a round: an all-gather of fixed size in which each worker names its operation. Workers that
    are in different operations find out there, and all raise the same error. Where the backend is gloo, messages have
    a group of their own: in the training group, one that meets a gradient of another size ends the process.

    Args:
        group: None for a single process, whose methods need no process group.
        device: device of the tensors that the group's collectives take.
        caller: the feature that errors name, such as "switch.step".
        side_group: use gloo, beside a group of any backend.

    Attributes:
        operation: what this worker is doing, for errors here and on other workers. It begins as `caller`.

    >>> alone = Workers(None, torch.device("cpu"), "example")
    >>> alone.gather(lambda: alone.rank), alone.max(torch.tensor([2.0]))
    ([0], tensor([2.]))
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        caller: str = "switch",
        *,
        side_group: bool = False,
    ) -> None:
        self.group = group
        self.device = device
        self.caller = self.operation = caller
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1
        self._side_group = side_group
        self._all_of_job = False
        self._pending: tuple[dist.Work, list[Tensor]] | None = None  # of `any_async`

    @classmethod
    def of_job(cls, caller: str, *, side_group: bool = False) -> Workers:
        """All workers of the job; a single process where no process group is initialized.

        Args:
            side_group: use gloo on the CPU, in a group of its own, so that messages do not interfere with the training
                traffic on the GPU.
        """
        if not _initialized():
            workers = cls(None, torch.device("cpu"), caller)
        else:
            cuda = dist.get_backend() == "nccl" and not side_group
            device = torch.device("cuda" if cuda else "cpu")
            workers = cls(dist.group.WORLD, device, caller, side_group=side_group)
        workers._all_of_job = True
        return workers

    def agree(self, facts: str, decision: int, about: str) -> int:
        """Check that all workers have the same `facts`, and return the decision (0 to 255) of rank 0.

        One collective of fixed size gives every worker every answer, so a difference raises the same error on all
        of them and never hangs.

        Args:
            about: what the facts are, for the error.
        """
        if self.size == 1:
            return decision
        answers = self._round("compare", hashlib.sha256(facts.encode()).digest() + bytes([decision]))
        others = [rank for rank, answer in enumerate(answers) if answer[:32] != answers[0][:32]]
        if others:
            raise RuntimeError(f"{self.operation}: ranks {others} differ from rank 0 in {about}")
        return answers[0][32]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every worker and return its own result. An error on one worker is raised on all."""
        return self._run(work, share=False)[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every worker and return all results, in the order of ranks. JSON must be able to hold them."""
        return self._run(work, share=True)[1]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result everywhere. JSON must be able to hold it."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def broadcast_tensor(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with the one of rank `source`, and return it."""
        if self.size > 1:
            data = tensor.detach().contiguous()
            with self._contact() as group:
                # As bytes: backends refuse dtypes such as int16.
                dist.broadcast(data.view(-1).view(torch.uint8), group=group, group_src=source)
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data)
        return tensor

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the workers, on the CPU."""
        if self.size > 1:
            values = values.to(self.device)
            with self._contact() as group:
                dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return values.cpu()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Mean of each number over the workers."""
        return [fmean(column) for column in zip(*self.gather(lambda: list(values)), strict=True)]

    def any_async(self, flag: bool) -> bool:
        """Whether any worker passed True: at the next call, or at once in a single process.

        The messages are sent while the workers compute, and all of them get the answer at the same call.
        """
        if self.size == 1:
            return flag
        if self._pending is not None:
            request, answers = self._pending
            with self._contact():
                request.wait()
            self._pending = None
            if any(payload[0] for payload in _payloads(answers)):
                return True
        own, answers = self._message("flag", bytes([flag]))
        with self._contact() as group:
            request = dist.all_gather(answers, own, group=group, async_op=True)
        assert request is not None
        self._pending = request, answers
        return False

    def _run(self, work: Callable[[], T], share: bool) -> tuple[T, list[T]]:
        """Results of this worker and, if shared, of all; one collective of a number if nothing is shared or wrong."""
        if self.size == 1:
            if self._all_of_job and _initialized() and dist.get_world_size() > 1:
                raise RuntimeError(
                    f"{self.caller} was created before init_process_group; create it afterwards"
                )
            result = work()
            return result, [result]
        problem: Exception | None = None
        message = ""
        try:
            result = work()
            if share:
                message = json.dumps(["", "", result])
        except Exception as error:  # of any kind: the other workers must not wait for this one
            problem, message = error, json.dumps([*_describe(error), None])
        try:
            texts = self._all_gather_text(message)
        except RuntimeError as lost:
            raise (problem or lost) from lost.__cause__
        answers: list[Any] = [json.loads(text) if text else ["", "", None] for text in texts]
        _raise_first([(kind, text) for kind, text, _ in answers], problem)
        return result, [answer[2] for answer in answers]

    def _all_gather_text(self, text: str) -> list[str]:
        """Texts of all workers. They are padded to the longest; if all are empty, only their lengths are sent."""
        data = _to_bytes(text)
        lengths = [
            int.from_bytes(answer[:8], "big") for answer in self._round("run", len(data).to_bytes(8, "big"))
        ]
        if not any(lengths):
            return [""] * self.size
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = data
        own = own.to(self.device)
        texts = [torch.empty_like(own) for _ in lengths]
        with self._contact() as group:
            dist.all_gather(texts, own, group=group)
        return [
            bytes(text[:length].cpu().numpy()).decode() for text, length in zip(texts, lengths, strict=True)
        ]

    def _round(self, kind: str, payload: bytes) -> list[bytes]:
        """The payloads of all workers, after a check that all are in the same round of the same operation."""
        own, answers = self._message(kind, payload)
        with self._contact() as group:
            dist.all_gather(answers, own, group=group)
        return _payloads(answers)

    def _message(self, kind: str, payload: bytes) -> tuple[Tensor, list[Tensor]]:
        """The message of this worker in a round, and memory for those of all."""
        name = f"{self.operation} ({kind})".encode()[:_NAME].ljust(_NAME, b"\0")
        own = torch.tensor(list(name + payload.ljust(_PAYLOAD, b"\0")), dtype=torch.uint8, device=self.device)
        return own, [torch.empty_like(own) for _ in range(self.size)]

    @contextmanager
    def _contact(self) -> Iterator[dist.ProcessGroup]:
        """The group for messages. If the backend fails, the error names the operation and what others were doing."""
        assert self.group is not None
        start = time.monotonic()
        try:
            yield self._message_group(self.group)
        except RuntimeError as error:
            raise lost_contact(self.operation, self.group, time.monotonic() - start) from error

    def _message_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        timeout = _gloo_timeout(group, self.device)
        if timeout is None and not self._side_group:
            return group
        known = _beside.get(group)
        beside = known() if known else None
        if beside is None:  # none yet, or destroyed
            ranks = dist.get_process_group_ranks(group)
            beside = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
            _beside[group] = weakref.ref(beside)
        return beside


def _raise_first(errors: list[tuple[str, str]], own: Exception | None) -> None:
    """Raise the first error of the workers, given the type and message of each ("" where there is none)."""
    if own is not None and len(set(errors)) == 1:
        raise own  # the same on all workers
    for rank, (kind, text) in enumerate(errors):
        if kind:
            raise _ERRORS.get(kind, RuntimeError)(f"rank {rank}: {text}") from own


def _payloads(answers: list[Tensor]) -> list[bytes]:
    """The payloads of a round. Raises RuntimeError, the same on all workers, if they are in different ones."""
    messages = [bytes(answer.cpu().numpy()) for answer in answers]
    places: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        places.setdefault(message[:_NAME].rstrip(b"\0").decode(errors="replace"), []).append(rank)
    if len(places) > 1:
        found = "; ".join(f"{workers_text(ranks)} in {place}" for place, ranks in places.items())
        raise RuntimeError(
            f"the workers are out of step: {found}; every worker must make the same calls in the same order"
        )
    return [message[_NAME:] for message in messages]


def _gloo_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Time limit of the group's collectives on this device; None if they do not run on gloo."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # none for this device, such as NCCL for the CPU
        return None
    return backend.options._timeout if backend.name() == "gloo" else None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _to_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _describe(error: Exception) -> tuple[str, str]:
    """The type that other workers raise for an error, and its message."""
    for name, kind in _ERRORS.items():
        if isinstance(error, kind):
            return name, str(error)
    return "RuntimeError", str(error) if isinstance(
        error, RuntimeError
    ) else f"{type(error).__name__}: {error}"


class LostContact(RuntimeError):
    """Raised where a collective failed: a worker has exited, is elsewhere, or cannot be reached."""


def lost_contact(operation: str, group: Any, seconds: float) -> LostContact:
    """Return the error of an operation in which a collective failed, to be raised from the backend's error.

    Args:
        operation: operation of this worker, such as "switch.step".
        group: the process group of the collective.
        seconds: for which this worker has waited.
    """
    return LostContact(
        f"{operation}: worker {dist.get_rank(group)} lost contact with the others after {seconds:.0f} s: a worker has "
        "exited, is elsewhere, such as in a training step, or cannot be reached. Look for the first error in the "
        "workers' logs; every worker must make the same calls in the same order"
    )


def workers_text(ranks: list[int]) -> str:
    """
    >>> workers_text([1]), workers_text([0, 2])
    ('worker 1', 'workers 0, 2')
    """
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
