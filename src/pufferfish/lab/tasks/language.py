"""GPTs that guess the next token of a text: what such tasks have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.order import Epoch, Splits, drawn, steps
from ..data.token_rows import windows
from ..models import GPT, REFERENCES
from .task import Batch, Recipe, Task, evaluating


@dataclass(frozen=True)
class Windows(Task):
    """A text in windows of `context` tokens; the data is `Splits` of one row of tokens each.

    Args:
        d, layers, heads, context: of the GPT.
        dropout: on its embedding and on what every block adds.
    """

    higher = False
    vocabulary: ClassVar[int]

    d: int = 384
    layers: int = 6
    heads: int = 6
    context: int = 256
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.d % self.heads:
            raise ValueError(f"{self.name}: d={self.d} is no multiple of heads={self.heads}")

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        return {
            "short": Recipe(
                epochs=24, batch=64, lr=1e-3, schedule="cosine", warm_up=0.07, floor=0.1, optimizer="adamw",
                betas=(0.9, 0.99), weight_decay=0.1, clip=1.0, switch_at=8,
            )
        }  # fmt: skip

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES["gpt"].keep

    def build(self) -> nn.Module:
        model = GPT(
            vocabulary=self.vocabulary, d=self.d, layers=self.layers, heads=self.heads, context=self.context
        )
        for name, module in model.named_modules():
            if name == "embedding" or name.endswith((".attention", ".down")):
                module.register_forward_hook(self._drop)  # such hooks go along at a switch
        return model

    def _drop(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, self.dropout, module.training)

    def steps(self, data: Splits, batch: int) -> int:
        return steps(self._count(data), batch, f"windows of {self.context} tokens")

    def _count(self, data: Splits) -> int:
        """Windows to train on, wherever the epoch's first one begins."""
        return data.size("train") // self.context - 1

    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        (text,) = data.on(of.split, of.device)
        # Every epoch of training cuts the text elsewhere.
        first = int(drawn(1, of.generator) * self.context) if of.training else 0
        cut = windows(text, self.context, first)
        for rows in of.order(self._count(data) if of.training else len(cut), "windows"):
            yield (cut[of.share(rows)],)
        left = (len(text) - 1) % self.context
        if left and not of.training:  # what fills no window is the last worker's
            yield (text[None, -left - 1 :][: of.rank == of.size - 1],)

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        return self._loss(model, batch[0], label_smoothing=recipe.label_smoothing)

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: torch.device | str = "cpu", batch: int = 64
    ) -> dict[str, float]:
        lost, seen = torch.zeros((), device=device), 0
        with evaluating(model) as plain:
            for (tokens,) in self.batches(data, split, batch, device=device):
                lost += self._loss(plain, tokens, reduction="sum")
                seen += tokens[:, 1:].numel()
        return figures(float(lost), seen)

    def _loss(self, model: nn.Module, tokens: Tensor, **settings: Any) -> Tensor:
        """Cross-entropy of every token but the first."""
        logits = model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), **settings)


def figures(lost: float, seen: int) -> dict[str, float]:
    """Mean loss in nats a token, and the perplexity.

    >>> figures(lost=2.0, seen=2)["perplexity"]
    2.718
    """
    loss = lost / seen
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
