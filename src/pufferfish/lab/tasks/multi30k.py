"""Multi30k, German to English: the paper's Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..data.bpe import BEGIN, BPE, END, PADDING
from ..data.dataset import read
from ..data.multi30k import DATASET, pairs
from ..data.order import Epoch, Splits, steps
from ..models import REFERENCES, Transformer
from .beam import beam_search
from .bleu import bleu
from .language import figures
from .task import Batch, Recipe, Task, evaluating


@dataclass(frozen=True)
class Pairs:
    """Sentences as numbers, source and target, padded at the end; and the targets as people wrote them."""

    rows: Splits
    targets: Mapping[str, Sequence[str]]
    bpe: BPE


@dataclass(frozen=True)
class Multi30k(Task):
    """The paper's translation task. A batch is (source, target, tokens): the tokens to guess, a worker's share of all.

    Args:
        d, layers, heads, hidden, dropout: of the Transformer.
        vocabulary: pieces of words, German and English together, learned from the training text. The paper has as many words.
        length: of a sentence, at most.
        beam: width of the search when translating.

    >>> sum(p.numel() for p in Multi30k().build().parameters())
    48978432
    """

    name = "multi30k"
    measure = "bleu"
    static = False
    dataset = DATASET

    d: int = 512
    layers: int = 6
    heads: int = 8
    hidden: int = 2048
    dropout: float = 0.1
    vocabulary: int = 9521
    length: int = 128
    beam: int = 5

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        # The paper's own: Noam's schedule with 128,000 steps of warm-up, of which 400 epochs are 45,200.
        paper = Recipe(
            epochs=400, batch=256, lr=(512 * 128_000) ** -0.5, schedule="inverse-sqrt", warm_up=128_000 / 45_200,
            optimizer="adam", betas=(0.9, 0.98), label_smoothing=0.1, switch_at=10,
        )  # fmt: skip
        short = Recipe(
            epochs=30, batch=256, lr=7e-4, schedule="inverse-sqrt", warm_up=0.2,
            optimizer="adam", betas=(0.9, 0.98), label_smoothing=0.1, switch_at=10,
        )  # fmt: skip
        return {"paper": paper, "short": short}

    @property
    def keep(self) -> Sequence[str]:
        return REFERENCES["transformer"].keep

    def build(self) -> nn.Module:
        return Transformer(
            vocabulary=self.vocabulary, d=self.d, layers=self.layers, heads=self.heads, hidden=self.hidden,
            dropout=self.dropout, padding=PADDING, length=2 * self.length,
        )  # fmt: skip

    def load(self, folder: Path | None) -> Pairs:
        sentences = pairs(read(DATASET, folder))
        bpe = BPE.learn((s for both in sentences["train"] for s in both), self.vocabulary)
        rows = {
            split: (self._rows(bpe, de, END), self._rows(bpe, en, BEGIN, END))
            for split, (de, en) in sentences.items()
        }
        return Pairs(Splits(rows), {split: english for split, (_, english) in sentences.items()}, bpe)

    def _rows(self, bpe: BPE, texts: Sequence[str], *around: int) -> Tensor:
        *begin, end = around
        room = self.length - len(around)
        rows = [torch.tensor([*begin, *bpe.encode(text)[:room], end]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=PADDING)

    def steps(self, data: Pairs, batch: int) -> int:
        return steps(data.rows.size("train"), batch, "training sentences")

    def epoch(self, data: Any, of: Epoch) -> Iterator[Batch]:
        both = data.rows.on(of.split, of.device)
        # Counted on the CPU: a batch is cut without waiting for the device.
        lengths = [(x != PADDING).sum(1) for x in data.rows.on(of.split, "cpu")]
        for rows in of.order(data.rows.size(of.split), "training sentences", device="cpu"):
            mine = of.share(rows).to(of.device)
            source, target = (x[mine, : int(l[rows].max())] for x, l in zip(both, lengths, strict=True))
            tokens = (int(lengths[1][rows].sum()) - len(rows)) / of.size
            yield source, target, torch.tensor(tokens, device=of.device)

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        return self._lost(model, batch, recipe.label_smoothing) / batch[2]

    def _lost(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, summed over the tokens."""
        source, target, _ = batch
        logits = model(source, target[:, :-1]).float()
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(),
            ignore_index=PADDING, label_smoothing=label_smoothing, reduction="sum",
        )  # fmt: skip

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: torch.device | str = "cpu", batch: int = 128
    ) -> dict[str, float]:
        lost, seen = torch.zeros((), device=device), 0.0
        with evaluating(model) as plain:
            for part in self.batches(data, split, batch, device=device):
                lost += self._lost(plain, part)
                seen += float(part[2])
            said = self.translate(plain, data, split, device=device, batch=batch)
        return {"bleu": bleu(said, data.targets[split]), **figures(float(lost), round(seen))}

    def translate(
        self,
        model: nn.Module,
        data: Pairs,
        split: str,
        *,
        device: torch.device | str = "cpu",
        batch: int = 128,
    ) -> list[str]:
        """The sentences of a split, translated by beam search."""
        longest = min(data.rows.on(split, "cpu")[0].shape[1] + 50, 2 * self.length)  # whatever the batch
        said = []
        plain: Any
        with evaluating(model) as plain:
            for source, *_ in self.batches(data, split, batch, device=device):
                found = beam_search(
                    plain, source, width=self.beam, longest=longest, begin=BEGIN, end=END, padding=PADDING
                )
                said += [data.bpe.decode(row) for row in found.tolist()]
        return said
