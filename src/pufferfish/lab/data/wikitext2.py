"""WikiText-2, word level: the three official files, with a token for the end of each line."""

import numpy as np
import torch
from torch import Tensor

from .batches import Splits
from .dataset import DataFile, Dataset, Download

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
