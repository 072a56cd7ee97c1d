"""WikiText-2, word by word: the paper's LSTM, or a small GPT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.dataset import read
from ..data.order import Epoch, Splits, steps
from ..data.token_rows import columns
from ..data.wikitext2 import DATASET, VOCABULARY, tokens
from ..models import REFERENCES, LSTMLanguageModel
from .language import Windows, figures
from .task import Batch, Recipe, Task, evaluating

#: Columns of a text to evaluate on: as many as in the paper's code, so that figures compare.
COLUMNS = 10


def load(folder: Path | None) -> Splits:
    """The three splits, one row of tokens each."""
    return Splits({split: (row,) for split, row in tokens(read(DATASET, folder)).items()})


@dataclass(frozen=True)
class Wikitext2(Task):
    """The paper's language task.

    The text lies in as many columns as a batch has rows. A batch is (tokens, targets, h, c): the next `bptt` rows of the
    columns, and the LSTM's state, which `loss` writes for the batch after it.

    Args:
        d, layers, dropout: of the LSTM.
        bptt: words that gradients go back through.

    >>> Wikitext2().recipe("paper").lr
    20.0
    """

    name = "wikitext2"
    measure = "perplexity"
    higher = False
    dataset = DATASET

    d: int = 1500
    layers: int = 2
    dropout: float = 0.65
    bptt: int = 35

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        paper = Recipe(
            epochs=40, batch=20, lr=20.0, schedule="plateau", plateau=0.25, momentum=0.0, clip=0.25,
            switch_at=10, switch_lr=0.5,
        )  # fmt: skip
        short = Recipe(epochs=12, batch=80, lr=20.0, momentum=0.0, clip=0.25, switch_at=4)
        return {"paper": paper, "short": short}

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES["lstm"].keep

    @property
    def carries(self) -> int:
        return 2

    def build(self) -> nn.Module:
        return LSTMLanguageModel(vocabulary=VOCABULARY, d=self.d, layers=self.layers, dropout=self.dropout)

    def load(self, folder: Path | None) -> Splits:
        return load(folder)

    def steps(self, data: Splits, batch: int) -> int:
        rows = data.size("train") // batch
        return steps(rows - 1, self.bptt, f"words in each of {batch} columns to guess")

    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        (text,) = data.on(of.split, of.device)
        width = of.batch if of.training else COLUMNS
        mine = columns(text, width)[:, of.part(width)]
        # Training batches are of one size; of a text to evaluate on the last one may be shorter.
        last = self.bptt * self.steps(data, of.batch) if of.training else len(mine) - 1
        h, c = (torch.zeros(self.layers, mine.shape[1], self.d, device=of.device) for _ in range(2))
        for i in range(of.start * self.bptt, last, self.bptt):
            end = min(i + self.bptt, last)
            yield mine[i:end], mine[i + 1 : end + 1], h, c

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        text, targets, h, c = batch
        logits, state = model(text, (h.clone(), c.clone()))  # what backward needs stays as it is
        if model.training:
            for old, new in zip((h, c), state, strict=True):
                old.copy_(new.detach())
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), label_smoothing=recipe.label_smoothing
        )

    def evaluate(
        self,
        model: nn.Module,
        data: Any,
        split: str,
        *,
        device: torch.device | str = "cpu",
        batch: int = COLUMNS,
    ) -> dict[str, float]:
        """`batch` changes nothing: the text always lies in the same columns."""
        lost, seen = torch.zeros((), device=device), 0
        state: Any = None
        with evaluating(model) as plain:
            for text, targets, *zeros in self.batches(data, split, batch, device=device):
                logits, state = plain(text, tuple(zeros) if state is None else state)
                lost += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
                seen += targets.numel()
        return figures(float(lost), seen)


@dataclass(frozen=True)
class Wikitext2GPT(Windows):
    """The same text for a small GPT: `wikitext2:gpt`.

    Args:
        d, layers, heads, context, dropout: of the GPT.
    """

    name = "wikitext2"
    measure = "perplexity"
    dataset = DATASET
    vocabulary = VOCABULARY

    context: int = 128

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        return {
            "short": Recipe(
                epochs=12, batch=64, lr=1e-3, schedule="cosine", warm_up=0.05, floor=0.1, optimizer="adamw",
                betas=(0.9, 0.99), weight_decay=0.1, clip=1.0, switch_at=4,
            )
        }  # fmt: skip

    def load(self, folder: Path | None) -> Splits:
        return load(folder)
