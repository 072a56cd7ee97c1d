"""Language models: `wikitext2` with an LSTM, and next-token prediction with a GPT or a Llama for `wikitext2`, `enwik8` and `text`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.names import unwrap
from ..data.batches import BatchOrder, Device, Splits, steps_per_epoch, uniform
from ..data.dataset import DataFile, Dataset, Download, data_folder, read_files
from ..data.text import TextSplits, split_bytes, to_columns, to_windows, tokenize, vocabulary_size
from ..models import GPT, REFERENCES, Llama, LSTMLanguageModel
from .task import Batch, Recipe, Task, check_choice, eval_mode

ENWIK8 = Dataset(
    name="enwik8",
    files={"enwik8": ("enwik8", "enwik8.gz")},
    archives=("enwik8.zip",),
    downloads=(
        Download(
            url="https://mattmahoney.net/dc/enwik8.zip",
            file="enwik8.zip",
            size=36_445_475,
            sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
    ),
)
#: Published checksum of the unpacked file.
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"


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


@dataclass(frozen=True)
class Enwik8(GPTTask):
    """enwik8: 90 MB for training, 5 MB for validation and 5 MB for testing, by position, as in the literature.

    An epoch is `epoch_tokens` bytes in windows drawn at random, so that runs shorter than the text can be planned and
    validated. A model of this size does not over-fit, so there is no dropout.

    >>> Enwik8(model="llama").recipe("short").epochs
    24
    """

    name = "enwik8"
    metric = "bits_per_byte"
    dataset = ENWIK8
    vocabulary = 256
    recipes: ClassVar[Mapping[str, Recipe]] = {"short": replace(GPTTask.recipes["short"], warm_up=0.05)}
    #: Checksum of the file that `load` accepts.
    md5: ClassVar[str] = MD5

    d: int = 512
    layers: int = 8
    heads: int = 8
    context: int = 512
    dropout: float = 0.0
    epoch_tokens: int = 10_000_000

    def load(self, folder: Path | None) -> TextSplits:
        return split_bytes(check_md5(read_files(ENWIK8, folder)["enwik8"], self.md5))


#: The tokenizer without a file: each byte is a token.
BYTES = "bytes"


@dataclass(frozen=True)
class Text(GPTTask):
    """A text: the first 90 % are for training, the next 5 % for validation, the last 5 % for testing.

    By default, the data folder is the file or contains a single .txt file. `file` names one of several; if it is a pattern,
    the files that match are joined in the order of their names.

    >>> import torch
    >>> Text(d=64, layers=2, heads=2, context=32).build()(torch.zeros(1, 32, dtype=torch.long)).shape
    torch.Size([1, 32, 256])
    """

    name = "text"
    metric = "bits_per_byte"

    file: str = ""
    tokenizer: str = BYTES  # or the path of a tokenizer.json, which needs the package tokenizers

    @property
    def vocabulary(self) -> int:
        return 256 if self.tokenizer == BYTES else vocabulary_size(Path(self.tokenizer))

    def load(self, folder: Path | None) -> TextSplits:
        folder = data_folder(folder, self.name, "a text file, or a folder with one")
        paths = self._paths(folder)
        text = b"".join(path.read_bytes() for path in paths)
        source = str(paths[0] if len(paths) == 1 else folder / self.file)
        if self.tokenizer == BYTES:
            data, unit = split_bytes(text), "bytes"
        else:
            data, unit = tokenize(text, Path(self.tokenizer), source), "tokens"
        sizes = [data.size(split) for split in data.sizes]
        if min(sizes) <= self.context:
            raise ValueError(
                f"{source}: {sum(sizes):,} {unit} are too few; 5 % of them must be more than the context of {self.context}"
            )
        return data

    def _paths(self, folder: Path) -> list[Path]:
        if folder.is_file():
            return [folder]
        if self.file and (folder / self.file).is_file():
            return [folder / self.file]
        pattern = self.file.lstrip("/") or "*.txt"
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if self.file and not files:
            raise ValueError(f"text: file {self.file} not found in {folder}")
        if not self.file and len(files) != 1:
            found = f"{len(files)} text files" if files else "no .txt file"
            use = "--data FILE or text:file=NAME" + (", or text:file=*.txt for all of them" if files else "")
            raise ValueError(f"text: {folder} has {found}; use {use}")
        return files


def check_md5(file: DataFile, expected: str) -> bytes:
    """Return the content of `file`; ValueError if it is not the one that results are published for."""
    found = hashlib.md5(file.data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(
            f"{file.path}: {len(file.data):,} bytes with MD5 {found}, expected {expected}; "
            "download it again, or use the task text for another file"
        )
    return file.data


WIKITEXT2 = Dataset(
    name="wikitext2",
    files={f"{split}.txt": (f"{split}.txt", f"wiki.{split}.tokens") for split in ("train", "valid", "test")},
    archives=("wikitext-2-v1.zip", "wikitext-2.tar.xz"),
    downloads=(
        Download(
            url="https://wikitext.smerity.com/wikitext-2-v1.zip",
            file="wikitext-2-v1.zip",
            sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ),
    ),
    folders=("wikitext-2",),
)
VOCABULARY = 33_278

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
    dataset = WIKITEXT2
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
        return read_tokens(read_files(WIKITEXT2, folder))

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
    dataset = WIKITEXT2
    vocabulary = VOCABULARY
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "short": replace(GPTTask.recipes["short"], epochs=12, warm_up=0.05, switch_at=4)
    }

    context: int = 128

    def load(self, folder: Path | None) -> Splits:
        return read_tokens(read_files(WIKITEXT2, folder))


def read_tokens(files: dict[str, DataFile]) -> Splits:
    """Token ids of each split; words are numbered in the order of their first occurrence in the training text."""
    ids: dict[str, int] = {}
    splits: dict[str, tuple[Tensor]] = {}
    for split in ("train", "valid", "test"):
        file = files[f"{split}.txt"]
        words = file.text().rstrip("\n").replace("\n", " <eos> ").split() + ["<eos>"]
        if split == "train":
            for word in words:
                ids.setdefault(word, len(ids))
            if len(ids) > VOCABULARY:
                raise ValueError(
                    f"{file.path}: {len(ids):,} different words, but WikiText-2 has {VOCABULARY:,}"
                )
            unknown = ids.get("<unk>")
        tokens = [ids.get(word, unknown) for word in words]
        if None in tokens:
            word = words[tokens.index(None)]
            raise ValueError(f"{file.path}: neither {word!r} nor <unk> is in the training text")
        splits[split] = (torch.from_numpy(np.array(tokens, dtype=np.int64)),)
    return Splits(splits)
