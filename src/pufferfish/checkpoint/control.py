"""Short messages between the ranks of a job, beside its training traffic: trouble and signals concern all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Control:
    """All ranks of the job, over gloo; or this process alone. Every method is for all of them to call."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if gloo else dist.new_group(backend="gloo")

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns here. Trouble on one rank is the same error on all."""
        return self._run(work, share=False)[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on every rank: something JSON can write."""
        return self._run(work, share=True)[1]

    def first(self, work: Callable[[], T]) -> T:
        """What `work` is on rank 0, which alone does it."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def anyone(self, flag: bool) -> bool:
        """Whether any rank raised its flag: alone at once, otherwise by the next call.

        The question travels while the ranks compute, and all get the answer at the same call.
        """
        if self.size == 1:
            return flag
        if self._pending is not None:
            work, answer = self._pending
            work.wait()
            if answer.item():
                self._pending = None
                return True
        answer = torch.tensor([int(flag)])
        work = dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = work, answer
        return False

    def _run(self, work: Callable[[], T], share: bool) -> tuple[T, list[T]]:
        if self.size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("made before init_process_group, when this process was alone; make it after")
        problem: Exception | None = None
        try:
            result: Any = work()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem, result = error, None
        answers: list[Any] = [[*_told(problem), result if share else None]]
        if self.size > 1:
            texts: list[Any] = [None] * self.size
            dist.all_gather_object(texts, json.dumps(answers[0]), group=self._group)
            answers = [json.loads(text) for text in texts]
        for rank, (kind, message, _) in enumerate(answers):
            if kind:
                where = f"rank {rank}: " if self.size > 1 else ""
                raise _ERRORS.get(kind, RuntimeError)(f"{where}{message}") from problem
        return result, [answer[2] for answer in answers]


class Sigterm:
    """Notes SIGTERM instead of dying of it. Only the main thread can ask for that; elsewhere it notes nothing."""

    def __init__(self) -> None:
        self.seen = False
        self._process = os.getpid()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which inherited this: not its affair
            signal.signal(signal.SIGTERM, self._previous)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.seen = True
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        """Give SIGTERM back, unless somebody has asked for it since."""
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._note:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, self._previous)


_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (OSError, ValueError, TypeError)}


def _told(problem: Exception | None) -> tuple[str, str]:
    """An error for other ranks: what they raise, and what it says. "" for none."""
    if problem is None:
        return "", ""
    for name, kind in _ERRORS.items():
        if isinstance(problem, kind):
            return name, str(problem)
    return "RuntimeError", f"{type(problem).__name__}: {problem}"
