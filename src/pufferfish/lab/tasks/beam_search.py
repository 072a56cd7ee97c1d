"""`beam_search` for encoder-decoder models."""

from typing import Protocol

import torch
from torch import Tensor


class EncoderDecoder(Protocol):
    """Model that `beam_search` can use."""

    def encode(self, source: Tensor) -> Tensor: ...

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor: ...


def beam_search(
    model: EncoderDecoder,
    source: Tensor,
    *,
    width: int,
    max_length: int,
    begin: int,
    end: int,
    padding: int = 0,
    alpha: float = 0.7,
) -> Tensor:
    """Translate a batch by beam search.

    Keeps `width` candidates per sentence, ranked by log-likelihood / ((5 + length) / 6)^alpha, because the
    plain likelihood favors short ones.

    Returns:
        Target tokens (n, time) of source tokens (n, time), beginning with `begin`, padded after `end`.
    """
    n = len(source)
    memory = model.encode(source).repeat_interleave(width, 0)
    source = source.repeat_interleave(width, 0)
    targets = torch.full((n * width, 1), begin, device=source.device)
    scores = torch.full((n, width), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # all candidates are the same at first, so only one may be extended
    lengths = torch.zeros(n, width, device=source.device)
    done = torch.zeros(n, width, dtype=torch.bool, device=source.device)
    first = torch.arange(n, device=source.device)[:, None] * width
    for _ in range(max_length):
        logits = model.decode(targets, memory, source)[:, -1]
        log_probs = logits.float().log_softmax(-1).view(n, width, -1)
        vocabulary = log_probs.shape[-1]
        pad_only = torch.full((vocabulary,), -torch.inf, device=source.device)
        pad_only[padding] = 0.0  # finished candidates are only padded
        totals = scores[..., None] + torch.where(done[..., None], pad_only, log_probs)
        new_lengths = (lengths + ~done)[..., None]
        chosen = (totals / ((5 + new_lengths) / 6) ** alpha).flatten(1).topk(width).indices
        rows, tokens = chosen // vocabulary, chosen % vocabulary
        scores = totals.flatten(1).gather(1, chosen)
        lengths = new_lengths[..., 0].gather(1, rows)
        done = done.gather(1, rows) | (tokens == end)
        targets = torch.cat((targets[(first + rows).flatten()], tokens.view(-1, 1)), 1)
        if done.all():
            break
    return targets.view(n, width, -1)[:, 0]  # topk sorts: the best candidate is first
