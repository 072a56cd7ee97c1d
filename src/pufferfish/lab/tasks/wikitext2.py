"""`Wikitext2` and `Wikitext2GPT`: WikiText-2, word level, with the paper's LSTM or a small GPT or Llama."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.names import unwrap
from ..data.batches import BatchOrder, Device, Splits, steps_per_epoch
from ..data.dataset import read_files
from ..data.text import to_columns
from ..data.wikitext2 import DATASET, VOCABULARY, read_tokens
from ..models import REFERENCES, LSTMLanguageModel
from .gpt_task import GPTTask, loss_and_perplexity
from .recipe import Recipe
from .task import Batch, Task, eval_mode

#: Columns in evaluation: as many as in the paper's code, so that figures are comparable.
COLUMNS = 10


@dataclass(frozen=True)
class Wikitext2(Task):
    """WikiText-2 with an LSTM, the paper's language task.

    The text is arranged in one column per row of a batch. A batch is (tokens, targets, h, c): the next `bptt` words of
    each column, and the LSTM's state, which `loss` updates for the next batch.

    >>> Wikitext2().recipe("paper").lr
    20.0
    """

    name = "wikitext2"
    metric = "perplexity"
    higher_is_better = False
    dataset = DATASET
    carried_tensors = 2
    keep = REFERENCES["lstm"].keep
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "paper": Recipe(
            epochs=40, batch=20, lr=20.0, schedule="plateau", plateau=0.25, momentum=0.0, clip=0.25,
            switch_at=10, switch_lr=0.5,
        ),
        "short": Recipe(epochs=12, batch=80, lr=20.0, momentum=0.0, clip=0.25, switch_at=4),
    }  # fmt: skip

    d: int = 1500
    layers: int = 2
    dropout: float = 0.65
    bptt: int = 35  # number of words for truncated backpropagation through time

    def build(self, width: float = 1.0) -> nn.Module:
        return LSTMLanguageModel(
            vocabulary=VOCABULARY, d=self.d, layers=self.layers, dropout=self.dropout, width=width
        )

    def load(self, folder: Path | None) -> Splits:
        return read_tokens(read_files(DATASET, folder))

    def steps(self, data: Splits, batch: int) -> int:
        rows = data.size("train") // batch
        return steps_per_epoch(rows - 1, self.bptt, f"words to predict in each of {batch} columns")

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        (text,) = data.on(order.split, order.device)
        width = order.batch if order.training else COLUMNS
        columns = to_columns(text, width)[:, order.shard_slice(width)]
        # Training batches have the same size; in evaluation the last one may be shorter.
        last = self.bptt * self.steps(data, order.batch) if order.training else len(columns) - 1
        h, c = (torch.zeros(self.layers, columns.shape[1], self.d, device=order.device) for _ in range(2))
        for i in range(order.start * self.bptt, last, self.bptt):
            end = min(i + self.bptt, last)
            yield columns[i:end], columns[i + 1 : end + 1], h, c

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        text, targets, h, c = batch
        lstm: Any = unwrap(model).lstm
        h, c = (x[..., : lstm.hidden_size] for x in (h, c))  # a narrower model uses only a part
        logits, state = model(text, (h.clone(), c.clone()))  # backward needs them unchanged
        if model.training:
            for old, new in zip((h, c), state, strict=True):
                old.copy_(new.detach())
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), label_smoothing=recipe.label_smoothing
        )

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = COLUMNS
    ) -> dict[str, float]:
        """`batch` has no effect: evaluation always uses the same columns."""
        loss, count = torch.zeros((), device=device), 0
        state: Any = None
        with eval_mode(model) as module:
            for text, targets, *_ in self.batches(data, split, batch, device=device):
                logits, state = module(text, state)
                loss += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
                count += targets.numel()
        return loss_and_perplexity(float(loss), count)


@dataclass(frozen=True)
class Wikitext2GPT(GPTTask):
    """WikiText-2 with a small GPT or Llama: `wikitext2:gpt`, `wikitext2:llama`."""

    name = "wikitext2"
    metric = "perplexity"
    dataset = DATASET
    vocabulary = VOCABULARY
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "short": replace(GPTTask.recipes["short"], epochs=12, warm_up=0.05, switch_at=4)
    }

    context: int = 128

    def load(self, folder: Path | None) -> Splits:
        return read_tokens(read_files(DATASET, folder))
