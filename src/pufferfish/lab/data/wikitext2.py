"""WikiText-2, word level: the official three files, each line's end a word of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset, Download, Found

VOCABULARY = 33_278

DATASET = Dataset(
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


def tokens(files: dict[str, Found]) -> dict[str, Tensor]:
    """The splits as numbers; words are numbered as they appear in the training text."""
    number: dict[str, int] = {}
    found = {}
    for split in ("train", "valid", "test"):
        file = files[f"{split}.txt"]
        words = file.text().rstrip("\n").replace("\n", " <eos> ").split() + ["<eos>"]
        if split == "train":
            for word in words:
                number.setdefault(word, len(number))
            if len(number) > VOCABULARY:
                raise ValueError(
                    f"{file.where}: {len(number):,} different words, WikiText-2 has {VOCABULARY:,}"
                )
            unknown = number.get("<unk>")
        numbers = [number.get(word, unknown) for word in words]
        if None in numbers:
            word = words[numbers.index(None)]
            raise ValueError(f"{file.where}: {word!r} is neither in the training text, nor is <unk>")
        found[split] = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return found
