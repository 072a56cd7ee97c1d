"""`GPTTask`: base class of tasks that train a GPT or a Llama to predict the next token."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import BatchOrder, Device, Splits, steps_per_epoch, uniform
from ..data.text import TextSplits, to_windows
from ..models import GPT, REFERENCES, Llama
from .recipe import Recipe
from .task import Batch, Task, check_choice, eval_mode


@dataclass(frozen=True)
class GPTTask(Task):
    """Next-token prediction on windows of `context` tokens; the data is one token sequence per split."""

    higher_is_better = False
    keep = REFERENCES["gpt"].keep  # the same layers as in a Llama
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "short": Recipe(
            epochs=24, batch=64, lr=1e-3, schedule="cosine", warm_up=0.07, floor=0.1, optimizer="adamw",
            betas=(0.9, 0.99), weight_decay=0.1, clip=1.0, switch_at=8,
        )
    }  # fmt: skip

    model: str = "gpt"  # or "llama"
    d: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2  # heads of keys and values in a Llama
    context: int = 256
    dropout: float = 0.2  # on the embedding and on the output of attention and feed-forward
    epoch_tokens: int = 0  # training tokens of an epoch, in windows drawn at random; 0: all, each once

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check_choice(self.name, "model", self.model, ("gpt", "llama"))
        if self.d % self.heads:
            raise ValueError(f"{self.name}: d={self.d} is not a multiple of heads={self.heads}")
        if self.model == "llama" and (self.heads % self.kv_heads or self.d // self.heads % 2):
            raise ValueError(
                f"{self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, and d / heads even"
            )

    def build(self, width: float = 1.0) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocabulary": self.vocabulary, "d": self.d, "layers": self.layers, "heads": self.heads,
            "context": self.context, "width": width,
        }  # fmt: skip
        model = GPT(**sizes) if self.model == "gpt" else Llama(**sizes, kv_heads=self.kv_heads)
        for name, module in model.named_modules():
            if name == "embedding" or name.endswith((".attention", ".down")):
                module.register_forward_hook(self._drop)  # hooks are kept when a layer is factorized
        return model

    def _drop(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, self.dropout, module.training)

    def steps(self, data: Splits, batch: int) -> int:
        windows = self._count(data)
        if self.epoch_tokens:
            windows = min(windows, self.epoch_tokens // self.context)
        return steps_per_epoch(windows, batch, f"windows of {self.context} tokens in an epoch")

    def _count(self, data: Splits) -> int:
        """Number of training windows for any offset of the first one."""
        return data.size("train") // self.context - 1

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        (text,) = data.on(order.split, order.device)
        # In training, windows begin at a random offset in each epoch.
        first = int(uniform(1, order.generator) * self.context) if order.training else 0
        windows = to_windows(text, self.context, first)
        batches = order.batches(self._count(data) if order.training else len(windows), "windows")
        for rows in islice(batches, self.steps(data, order.batch) - order.start if order.training else None):
            yield (windows[order.shard(rows)].long(),)  # the text has small integers, to save memory
        rest = (len(text) - 1) % self.context
        if rest and not order.training:  # the last, shorter window goes to the last worker
            yield (text[None, -rest - 1 :][: order.worker == order.world_size - 1].long(),)

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        return self._loss(model, batch[0], label_smoothing=recipe.label_smoothing)

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = 64
    ) -> dict[str, float]:
        loss, count = torch.zeros((), dtype=torch.float64, device=device), 0
        with eval_mode(model) as module:
            for (tokens,) in self.batches(data, split, batch, device=device):
                loss += self._loss(module, tokens, reduction="sum")
                count += tokens[:, 1:].numel()
        figures = loss_and_perplexity(float(loss), count)
        if isinstance(data, TextSplits):
            figures["bits_per_byte"] = data.bits_per_byte(split, figures["loss"])
        return figures

    def _loss(self, model: nn.Module, tokens: Tensor, **settings: Any) -> Tensor:
        """Cross-entropy of all tokens except the first of each window."""
        logits = model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), **settings)


def loss_and_perplexity(total: float, tokens: int) -> dict[str, float]:
    """Mean loss in nats per token, and perplexity, from the loss summed over all tokens.

    >>> loss_and_perplexity(2.0, tokens=2)["perplexity"]
    2.718
    """
    loss = total / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
