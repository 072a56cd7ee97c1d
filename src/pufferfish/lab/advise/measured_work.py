"""`computing` and `sending`: the work of real ways to train, measured without waiting for anybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...compression.method import Method
from ...measure import Work, dry_run
from ...measure.clock import typical
from ...measure.compute_work import COMPUTING, alone
from ...measure.remedies import gradients, plain
from .contender import Contender
from .current_job import in_job, shared, told

#: Steps that are timed fill so many seconds, and are at least and at most so many.
_SECONDS, _LEAST, _MOST = 1.0, 5, 50


def computing(way: Contender) -> Work:
    """A step without its exchange. In a job: the mean over the workers, as long as the slowest of them takes."""
    for _ in range(2):
        (lap,) = shared([way.own_seconds()])
    steps = max(_LEAST, min(_MOST, int(_SECONDS / lap)))
    work = alone(way.model, lambda: way.step(exchange=False), way.optimizer, steps=steps)
    parts = shared([getattr(work, name) for name in COMPUTING])
    laps = shared([way.own_seconds() for _ in range(steps)], slowest=True)
    longer = max(1.0, typical(laps) / sum(parts))
    buffers = sum(x.nbytes for x in way.bare.buffers()) if in_job() else 0
    changed: dict[str, Any] = {n: longer * x for n, x in zip(COMPUTING, parts, strict=True)}
    ready = tuple(map(tuple, told(work.ready)))
    return replace(work, **changed, buffers=buffers, ready=ready)


def sending(work: Work, model: torch.nn.Module, method: Method | None, size: int, per_node: int = 1) -> Work:
    """The same with the messages of plain DDP, or of a method that takes its place, between machines alone where `per_node` is above 1."""
    like = gradients(model)
    work = plain(work, like)
    if method is None:
        return work
    if in_job():
        dist.barrier()
    sent = dry_run(method, like, size, per_node=per_node)
    encode, decode = shared([sent.encode, sent.decode], slowest=True)
    return replace(
        work, messages=sent.messages, overlaps=sent.overlaps, encode=encode, decode=decode, inside=sent.inside
    )
