"""`Multi30k`: German to English with the paper's Transformer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..data.batches import BatchOrder, Device, Splits, steps_per_epoch
from ..data.bpe import BEGIN, BPE, END, PADDING
from ..data.dataset import read_files
from ..data.multi30k import DATASET, read_sentences
from ..models import REFERENCES, Transformer
from .beam_search import beam_search
from .bleu import bleu, require_sacrebleu
from .gpt_task import loss_and_perplexity
from .recipe import Recipe
from .task import Batch, Task, eval_mode


@dataclass(frozen=True)
class TranslationData:
    """Tokenized sentence pairs, and the tokenizer."""

    rows: Splits  # source and target tokens of each split, padded at the end
    targets: Mapping[str, Sequence[str]]  # original text of the target sentences of each split
    bpe: BPE


@dataclass(frozen=True)
class Multi30k(Task):
    """Multi30k German to English, the paper's translation task, but with a BPE vocabulary.

    A batch is (source, target, tokens), where `tokens` is the number of target tokens in the global batch divided by the
    number of workers.

    >>> sum(p.numel() for p in Multi30k().build().parameters())
    48978432
    """

    name = "multi30k"
    metric = "bleu"
    static_shapes = False
    dataset = DATASET
    keep = REFERENCES["transformer"].keep
    recipes: ClassVar[Mapping[str, Recipe]] = {
        # The paper's Noam schedule has 128,000 steps of warm-up, but 400 epochs are only 45,200 steps.
        "paper": Recipe(
            epochs=400, batch=256, lr=(512 * 128_000) ** -0.5, schedule="inverse-sqrt", warm_up=128_000 / 45_200,
            optimizer="adam", betas=(0.9, 0.98), label_smoothing=0.1, switch_at=10,
        ),
        "short": Recipe(
            epochs=30, batch=256, lr=7e-4, schedule="inverse-sqrt", warm_up=0.2,
            optimizer="adam", betas=(0.9, 0.98), label_smoothing=0.1, switch_at=10,
        ),
    }  # fmt: skip

    d: int = 512
    layers: int = 6
    heads: int = 8
    hidden: int = 2048
    dropout: float = 0.1
    vocabulary: int = 9521  # of the joint BPE, learned from the training text; the paper's has as many words
    length: int = 128  # maximum number of tokens in a sentence
    beam: int = 5  # width of the beam search

    def build(self, width: float = 1.0) -> nn.Module:
        return Transformer(
            vocabulary=self.vocabulary, d=self.d, layers=self.layers, heads=self.heads, hidden=self.hidden,
            dropout=self.dropout, padding=PADDING, length=2 * self.length, width=width,
        )  # fmt: skip

    def load(self, folder: Path | None) -> TranslationData:
        require_sacrebleu()  # not only after the first epoch
        sentences = read_sentences(read_files(DATASET, folder))
        bpe = BPE.learn((s for both in sentences["train"] for s in both), self.vocabulary)
        rows = {
            split: (self._rows(bpe, de, END), self._rows(bpe, en, BEGIN, END))
            for split, (de, en) in sentences.items()
        }
        return TranslationData(Splits(rows), {split: en for split, (_, en) in sentences.items()}, bpe)

    def _rows(self, bpe: BPE, texts: Sequence[str], *around: int) -> Tensor:
        *begin, end = around
        room = self.length - len(around)
        rows = [torch.tensor([*begin, *bpe.encode(text)[:room], end]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=PADDING)

    def steps(self, data: TranslationData, batch: int) -> int:
        return steps_per_epoch(data.rows.size("train"), batch, "training sentences")

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        pairs = data.rows.on(order.split, order.device)
        # On the CPU, so that a batch is trimmed without synchronizing with the device.
        lengths = [(x != PADDING).sum(1) for x in data.rows.on(order.split, "cpu")]
        for batch in order.batches(data.rows.size(order.split), "training sentences", device="cpu"):
            rows = order.shard(batch).to(order.device)
            source, target = (x[rows, : int(l[batch].max())] for x, l in zip(pairs, lengths, strict=True))
            tokens = (int(lengths[1][batch].sum()) - len(batch)) / order.world_size
            yield source, target, torch.tensor(tokens, device=order.device)

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        return self._summed_loss(model, batch, recipe.label_smoothing) / batch[2]

    def _summed_loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy summed over the target tokens."""
        source, target, _ = batch
        logits = model(source, target[:, :-1]).float()
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(),
            ignore_index=PADDING, label_smoothing=label_smoothing, reduction="sum",
        )  # fmt: skip

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = 128
    ) -> dict[str, float]:
        loss, count = torch.zeros((), device=device), 0.0
        with eval_mode(model) as module:
            for part in self.batches(data, split, batch, device=device):
                loss += self._summed_loss(module, part)
                count += float(part[2])
            translations = self.translate(module, data, split, device=device, batch=batch)
        return {
            "bleu": bleu(translations, data.targets[split]),
            **loss_and_perplexity(float(loss), round(count)),
        }

    def translate(
        self, model: nn.Module, data: TranslationData, split: str, *, device: Device = "cpu", batch: int = 128
    ) -> list[str]:
        """Translate the sentences of a split by beam search."""
        # From the whole split, so that the result does not depend on the batch size.
        max_length = min(data.rows.on(split, "cpu")[0].shape[1] + 50, 2 * self.length)
        translations: list[str] = []
        special = {"begin": BEGIN, "end": END, "padding": PADDING}
        module: Any
        with eval_mode(model) as module:
            for source, *_ in self.batches(data, split, batch, device=device):
                targets = beam_search(module, source, width=self.beam, max_length=max_length, **special)
                translations += [data.bpe.decode(row) for row in targets.tolist()]
        return translations
