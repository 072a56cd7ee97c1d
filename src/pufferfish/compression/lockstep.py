"""All methods' generators side by side: in every round their small messages of one kind travel as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .method import Gather, Message, Scatter, Steps, Sum, Together
from .transport import Coming, Transport

#: Task → message, or its answer, for one worker.
Round = dict[int, Any]
#: Bytes from which on a tensor is a message of its own: joining would copy it, and saves little.
LARGE = 2**20


class Lockstep:
    """Runs tasks, which are numbered: whatever the order of their starts, they lie in messages by number.

    A task's first messages go out when it starts, with those of all that start with it; for the answers, and for all
    further rounds, `finish` waits. All workers start the same tasks together.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.tasks: list[dict[int, Steps]] = [{} for _ in transport.ranks]
        self.results: list[dict[int, tuple[Tensor, Tensor | None]]] = [{} for _ in transport.ranks]
        self._coming: list[Coming[list[Round]]] = []

    def start(self, tasks: Sequence[dict[int, Steps]]) -> None:
        """More tasks, for each worker here."""
        for mine, more in zip(self.tasks, tasks, strict=True):
            mine.update(more)
        self._go_on([dict.fromkeys(more) for more in tasks])

    def finish(self) -> list[dict[int, tuple[Tensor, Tensor | None]]]:
        """What each task of each worker returns."""
        while self._coming:
            answers: list[Round] = [{} for _ in self.tasks]
            for wait in self._coming:
                for mine, more in zip(answers, wait(), strict=True):
                    mine.update(more)
            self._coming = []
            self._go_on(answers)
        return self.results

    def _go_on(self, answers: list[Round]) -> None:
        messages = [self._asked(worker, answered) for worker, answered in enumerate(answers)]
        if messages[0]:
            self._coming.append(exchange(messages, self.transport))

    def _asked(self, worker: int, answered: Round) -> Round:
        """What a worker's tasks want to send next."""
        messages: Round = {}
        while answered:
            here: Round = {}
            for t in sorted(answered):
                try:
                    message = self.tasks[worker][t].send(answered[t])
                except StopIteration as end:
                    self.results[worker][t] = end.value
                else:
                    (here if isinstance(message, Together) else messages)[t] = message
            answered = _together(here)
        return dict(sorted(messages.items()))


def _together(asked: dict[int, Together]) -> Round:
    """What needs no other worker."""
    answers: Round = {}
    for work in dict.fromkeys(message.work for message in asked.values()):
        mine = {t: message for t, message in asked.items() if message.work == work}
        step = next(iter(mine.values())).step
        found = work([message.tensor for message in mine.values()], step)
        answers.update(zip(mine, found, strict=True))
    return answers


def exchange(messages: list[dict[int, Message]], transport: Transport) -> Coming[list[Round]]:
    """One round, begun. Sums of each dtype, then what all get, then what goes to owners; large tensors on their own."""
    kinds: dict[type, list[int]] = {Sum: [], Gather: [], Scatter: []}
    for t, message in messages[0].items():
        kinds[type(message)].append(t)
    coming = [
        *_sums(messages, kinds[Sum], transport),
        *_gathers(messages, kinds[Gather], transport),
        *_scatters(messages, kinds[Scatter], transport),
    ]

    def wait() -> list[Round]:
        answers: list[Round] = [{} for _ in messages]
        for put in coming:
            put(answers)
        return answers

    return wait


Put = Callable[[list[Round]], None]


def _sums(messages: list[Round], which: list[int], transport: Transport) -> list[Put]:
    first = messages[0]
    dtypes = sorted({first[t].tensor.dtype for t in which}, key=str)
    together = [
        some
        for dtype in dtypes
        for some in _apart([(t, first[t].tensor.nbytes) for t in which if first[t].tensor.dtype == dtype])
    ]

    def begun(some: list[int]) -> Put:
        sent = [[mine[t].tensor for t in some] for mine in messages]
        coming = transport.sum([_flat(tensors) for tensors in sent])

        def put(answers: list[Round]) -> None:
            for tensors, buffer, answer in zip(sent, coming(), answers, strict=True):
                pieces = buffer.split([x.numel() for x in tensors])
                answer.update({t: p.view(x.shape) for t, p, x in zip(some, pieces, tensors, strict=True)})

        return put

    return [begun(some) for some in together]


def _gathers(messages: list[Round], which: list[int], transport: Transport) -> list[Put]:
    tensors = [{(t, j): x for t in which for j, x in enumerate(mine[t].tensors)} for mine in messages]

    def begun(some: list[tuple[int, int]]) -> Put:
        coming = transport.gather([_bytes([mine[i] for i in some]) for mine in tensors])

        def put(answers: list[Round]) -> None:
            for mine, buffers, answer in zip(tensors, coming(), answers, strict=True):
                _answered(answer, some, [_parted(buffer, [mine[i] for i in some]) for buffer in buffers])

        return put

    return [begun(some) for some in _apart([(i, x.nbytes) for i, x in tensors[0].items()])]


def _scatters(messages: list[Round], which: list[int], transport: Transport) -> list[Put]:
    #: (task, place in its tuple) → a tensor for each owner
    tensors = [
        {(t, j): xs for t in which for j, xs in enumerate(zip(*mine[t].pieces, strict=True))}
        for mine in messages
    ]

    def begun(some: list[tuple[int, int]]) -> Put:
        owners = range(transport.size)
        coming = transport.scatter(
            [[_bytes([mine[i][owner] for i in some]) for owner in owners] for mine in tensors]
        )

        def put(answers: list[Round]) -> None:
            for rank, mine, buffers, answer in zip(transport.ranks, tensors, coming(), answers, strict=True):
                like = [mine[i][rank] for i in some]
                _answered(answer, some, [_parted(buffer, like) for buffer in buffers])

        return put

    return [begun(some) for some in _apart([(i, sum(x.nbytes for x in xs)) for i, xs in tensors[0].items()])]


def _apart(sizes: Sequence[tuple[Any, int]]) -> list[list[Any]]:
    """Which go in one message: every large one alone, the others together."""
    small = [key for key, nbytes in sizes if nbytes < LARGE]
    return [[key] for key, nbytes in sizes if nbytes >= LARGE] + ([small] if small else [])


def _answered(answer: Round, some: list[tuple[int, int]], theirs: list[list[Tensor]]) -> None:
    """Put what all workers sent into the list of tuples that a method waits for. A tuple's places come in order."""
    for place, (t, j) in enumerate(some):
        everyone = answer.setdefault(t, [()] * len(theirs))
        answer[t] = [
            (*whose[:j], they[place], *whose[j:]) for whose, they in zip(everyone, theirs, strict=True)
        ]


def _flat(tensors: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([x.reshape(-1) for x in tensors])


def _bytes(tensors: list[Tensor]) -> Tensor:
    """Tensors of any dtypes as bytes, one after the other."""
    return _flat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _parted(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The tensors that `_bytes` was given elsewhere: shapes and dtypes are those of our own."""

    def typed(piece: Tensor, x: Tensor) -> Tensor:
        if piece.storage_offset() % x.itemsize:
            piece = piece.clone()  # a number may not begin between two places for numbers
        return piece.view(x.dtype).view(x.shape)

    pieces = buffer.split([x.nbytes for x in like])
    return [typed(piece, x) for piece, x in zip(pieces, like, strict=True)]
