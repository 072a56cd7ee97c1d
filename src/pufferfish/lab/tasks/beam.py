"""Beam search with an encoder-decoder model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Translator(Protocol):
    """What beam search asks of a model."""

    def encode(self, source: Tensor) -> Tensor: ...

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor: ...


def beam_search(
    model: Translator,
    source: Tensor,
    *,
    width: int,
    longest: int,
    begin: int,
    end: int,
    padding: int = 0,
    alpha: float = 0.7,
) -> Tensor:
    """The likeliest targets (n, time) that a beam of `width` finds for `source` (n, time).

    Targets begin with `begin`; behind `end` there is padding. They are ranked by log-likelihood / ((5 + length) / 6)^alpha,
    so that longer ones stand a chance.
    """
    n = len(source)
    memory = model.encode(source).repeat_interleave(width, 0)
    source = source.repeat_interleave(width, 0)
    targets = torch.full((n * width, 1), begin, device=source.device)
    scores = torch.full((n, width), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # all are the same at first: one goes on
    lengths = torch.zeros(n, width, device=source.device)
    done = torch.zeros(n, width, dtype=torch.bool, device=source.device)
    first = torch.arange(n, device=source.device)[:, None] * width
    for _ in range(longest):
        logits = model.decode(targets, memory, source)[:, -1]
        next_ = logits.float().log_softmax(-1).view(n, width, -1)
        words = next_.shape[-1]
        ended = torch.full((words,), -torch.inf, device=source.device)
        ended[padding] = 0.0  # a finished one goes on as it is
        totals = scores[..., None] + torch.where(done[..., None], ended, next_)
        long = (lengths + ~done)[..., None]
        chosen = (totals / ((5 + long) / 6) ** alpha).flatten(1).topk(width).indices
        rows, word = chosen // words, chosen % words
        scores = totals.flatten(1).gather(1, chosen)
        lengths = long[..., 0].gather(1, rows)
        done = done.gather(1, rows) | (word == end)
        targets = torch.cat((targets[(first + rows).flatten()], word.view(-1, 1)), 1)
        if done.all():
            break
    return targets.view(n, width, -1)[:, 0]  # topk puts the best first
