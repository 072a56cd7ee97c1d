"""`Multi30k`: German to English with the paper's Transformer, scored by BLEU of a beam search."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..data.batches import BatchOrder, Device, Splits, steps_per_epoch
from ..data.dataset import DataFile, Dataset, Download, read_files
from ..data.text import BEGIN, BPE, END, PADDING
from ..models import REFERENCES, Transformer
from .language import loss_and_perplexity
from .task import Batch, Recipe, Task, eval_mode

#: Original file names by split, and SHA-256 of the text by original file.
_STEMS = {"train": "train", "val": "val", "test2016": "test_2016_flickr"}
_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
_CHECKSUMS = {
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
}

DATASET = Dataset(
    name="multi30k",
    files={
        f"{split}.{language}": (f"{split}.{language}", f"{stem}.{language}", f"{stem}.{language}.gz")
        for split, stem in _STEMS.items()
        for language in ("de", "en")
    },
    archives=("multi30k.tar.xz", "multi30k.tar.gz"),
    downloads=tuple(
        Download(url=f"{_URL}/{file}.gz", file=f"{file}.gz", content_sha256=checksum)
        for file, checksum in _CHECKSUMS.items()
    ),
)


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


def read_sentences(files: dict[str, DataFile]) -> dict[str, tuple[list[str], list[str]]]:
    """Sentences of each split, German and English, aligned."""
    splits = {}
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test2016")):
        german, english = (files[f"{name}.{language}"] for language in ("de", "en"))
        source, target = (
            [" ".join(s.split()) for s in f.text().rstrip("\n").split("\n")] for f in (german, english)
        )
        if len(source) != len(target):
            raise ValueError(
                f"{german.path} has {len(source):,} lines and {english.path} has {len(target):,}; "
                "they must be translations line by line"
            )
        for file, lines in ((german, source), (english, target)):
            if "" in lines:
                raise ValueError(f"{file.path}: line {lines.index('') + 1:,} is empty")
        splits[split] = (source, target)
    return splits


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


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, from 0 to 100, with one reference per translation.

    >>> bleu(["a man sleeps on a green sofa ."], ["a man sleeps on a red sofa ."])
    59.46
    """
    return float(require_sacrebleu().corpus_bleu(list(translations), [list(references)]).score)


def require_sacrebleu() -> Any:
    """Import sacrebleu, or say how to install it."""
    try:
        return importlib.import_module("sacrebleu")
    except ImportError:
        raise ImportError("multi30k is scored by the package sacrebleu: pip install sacrebleu") from None
