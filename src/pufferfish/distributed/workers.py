"""`Workers`: the processes of one group, and how they agree, share errors and exchange small values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: Errors that keep their type on the other workers; all others become a RuntimeError there.
_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (OSError, ValueError, TypeError)}


class Workers:
    """The processes of one process group, or a single process. All of them call every method.

    Args:
        group: None for a single process, whose methods need no process group.
        device: of the tensors that the group's collectives take.
        caller: the feature that errors name.

    >>> alone = Workers(None, torch.device("cpu"), "example")
    >>> alone.gather(lambda: alone.rank), alone.broadcast_object("plan"), alone.max(torch.tensor([2.0]))
    ([0], 'plan', tensor([2.]))
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, caller: str = "switch") -> None:
        self.group = group
        self.device = device
        self.caller = caller
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1
        self._all_of_job = False
        self._pending: tuple[dist.Work, Tensor] | None = None  # of `any_async`

    @classmethod
    def of_job(cls, caller: str, *, side_group: bool = False) -> Workers:
        """All workers of the job; a single process where no process group is initialized.

        Args:
            side_group: use gloo on the CPU, in a group of its own unless the job runs on gloo, so that messages
                do not interfere with the training traffic on the GPU.
        """
        if not _initialized():
            workers = cls(None, torch.device("cpu"), caller)
        elif side_group:
            gloo = dist.get_backend() == "gloo"
            group = dist.group.WORLD if gloo else dist.new_group(backend="gloo")
            workers = cls(group, torch.device("cpu"), caller)
        else:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            workers = cls(dist.group.WORLD, torch.device(device), caller)
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
        own = torch.tensor([*hashlib.sha256(facts.encode()).digest(), decision], dtype=torch.uint8)
        answers = self._all_gather(own)
        others = [rank for rank, answer in enumerate(answers) if answer[:-1] != answers[0][:-1]]
        if others:
            raise RuntimeError(f"{self.caller}: ranks {others} differ from rank 0 in {about}")
        return answers[0][-1]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every worker and return its own result. An error on one worker is raised on all."""
        return self._run(work, share=False)[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every worker and return all results, in the order of ranks. JSON must be able to hold them."""
        return self._run(work, share=True)[1]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result everywhere. JSON must be able to hold it."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def broadcast_object(self, value: T) -> T:
        """The value of rank 0, on every worker. JSON must be able to hold it."""
        if self.size == 1:
            return value
        data = _to_bytes(json.dumps(value)).to(self.device)
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        if self.rank > 0:
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group=self.group, group_src=0)
        value = json.loads(bytes(data.cpu().numpy()))
        return value

    def broadcast_tensor(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with the one of rank `source`, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the workers, on the CPU."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Mean of each number over the workers."""
        shares = torch.tensor(values, dtype=torch.float64) / self.size
        means: list[float] = self._all_reduce(shares, dist.ReduceOp.SUM).tolist()
        return means

    def any_async(self, flag: bool) -> bool:
        """Whether any worker passed True: at the next call, or at once in a single process.

        The all-reduce runs while the workers compute, and all of them get the answer at the same call.
        """
        if self.size == 1:
            return flag
        if self._pending is not None:
            request, answer = self._pending
            request.wait()
            if answer.item():
                self._pending = None
                return True
        answer = torch.tensor([int(flag)], device=self.device)
        request = dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert request is not None
        self._pending = request, answer
        return False

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Assert that all workers hold the same bits."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for x in tensors:
            digest.update(x.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        answers = self._all_gather(torch.tensor(list(digest.digest()), dtype=torch.uint8))
        assert all(answer == answers[0] for answer in answers), (
            f"{self.caller}: workers hold different parameters"
        )

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
        answers: list[Any] = [
            json.loads(text) if text else ["", "", None] for text in self._all_gather_text(message)
        ]
        if problem is not None and all(answer[:2] == answers[0][:2] for answer in answers):
            raise problem  # the same on all workers
        for rank, (kind, text, _) in enumerate(answers):
            if kind:
                raise _ERRORS.get(kind, RuntimeError)(f"rank {rank}: {text}") from problem
        return result, [answer[2] for answer in answers]

    def _all_gather(self, own: Tensor) -> list[list[int]]:
        own = own.to(self.device)
        answers = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(answers, own, group=self.group)
        return [answer.tolist() for answer in answers]

    def _all_gather_text(self, text: str) -> list[str]:
        """Texts of all workers. They are padded to the longest; if all are empty, only their lengths are sent."""
        data = _to_bytes(text)
        lengths = [length for (length,) in self._all_gather(torch.tensor([len(data)]))]
        if not any(lengths):
            return [""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            bytes(answer[:length]).decode()
            for answer, length in zip(self._all_gather(padded), lengths, strict=True)
        ]

    def _all_reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values, op, group=self.group)
        return values.cpu()


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
