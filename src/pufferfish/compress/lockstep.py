"""All methods' generators side by side: in every round their messages of one kind travel as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .method import Gather, Message, Scatter, Steps, Sum
from .transport import Transport

#: Task → message, or its answer, for one worker.
Round = dict[int, Any]


def lockstep(tasks: list[list[Steps]], transport: Transport) -> list[list[tuple[Tensor, Tensor | None]]]:
    """What each task of each worker here returns. All workers have the same tasks in the same order."""
    results: list[dict[int, Any]] = [{} for _ in tasks]
    answers: list[Round] = [{} for _ in tasks]
    active = list(range(len(tasks[0])))
    while active:
        messages: list[Round] = [{} for _ in tasks]
        for worker, steps in enumerate(tasks):
            for t in active:
                try:
                    messages[worker][t] = steps[t].send(answers[worker].get(t))
                except StopIteration as end:
                    results[worker][t] = end.value
        active = list(messages[0])
        answers = exchange(messages, transport)
    return [[mine[t] for t in range(len(mine))] for mine in results]


def exchange(messages: list[dict[int, Message]], transport: Transport) -> list[Round]:
    """One round: an all-reduce for each dtype, an all-gather and an all-to-all, where there is something for them."""
    answers: list[Round] = [{} for _ in messages]
    sums: dict[str, list[int]] = {}
    kinds: dict[type, list[int]] = {Gather: [], Scatter: []}
    for t, message in messages[0].items():
        if isinstance(message, Sum):
            sums.setdefault(str(message.tensor.dtype), []).append(t)
        else:
            kinds[type(message)].append(t)
    for dtype in sorted(sums):
        _sum(messages, sums[dtype], transport, answers)
    if kinds[Gather]:
        _gather(messages, kinds[Gather], transport, answers)
    if kinds[Scatter]:
        _scatter(messages, kinds[Scatter], transport, answers)
    return answers


def _sum(messages: list[Round], which: list[int], transport: Transport, answers: list[Round]) -> None:
    buffers = [torch.cat([mine[t].tensor.reshape(-1) for t in which]) for mine in messages]
    for mine, buffer, answer in zip(messages, transport.sum(buffers), answers, strict=True):
        pieces = buffer.split([mine[t].tensor.numel() for t in which])
        answer.update({t: piece.view(mine[t].tensor.shape) for t, piece in zip(which, pieces, strict=True)})


def _gather(messages: list[Round], which: list[int], transport: Transport, answers: list[Round]) -> None:
    sent = [[mine[t].tensors for t in which] for mine in messages]
    everyone = transport.gather([_joined(parts) for parts in sent])
    for parts, buffers, answer in zip(sent, everyone, answers, strict=True):
        theirs = [_parted(buffer, parts) for buffer in buffers]
        answer.update({t: [they[i] for they in theirs] for i, t in enumerate(which)})


def _scatter(messages: list[Round], which: list[int], transport: Transport, answers: list[Round]) -> None:
    size = transport.size
    sent = [[[mine[t].pieces[owner] for t in which] for owner in range(size)] for mine in messages]
    received = transport.scatter([[_joined(parts) for parts in pieces] for pieces in sent])
    for rank, pieces, buffers, answer in zip(transport.ranks, sent, received, answers, strict=True):
        theirs = [_parted(buffer, pieces[rank]) for buffer in buffers]
        answer.update({t: [they[i] for they in theirs] for i, t in enumerate(which)})


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Tensors of any dtypes as bytes, one after the other."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for part in parts for x in part])


def _parted(buffer: Tensor, like: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """The tensors that `_joined` was given elsewhere: shapes and dtypes are those of our own."""
    pieces = iter(buffer.split([x.nbytes for part in like for x in part]))

    def typed(x: Tensor) -> Tensor:
        piece: Tensor = next(pieces)
        if piece.storage_offset() % x.itemsize:
            piece = piece.clone()  # a number may not begin between two places for numbers
        return piece.view(x.dtype).view(x.shape)

    return [tuple(typed(x) for x in part) for part in like]
