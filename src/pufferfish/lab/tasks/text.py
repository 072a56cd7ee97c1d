"""Any text file, byte by byte: a small GPT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.dataset import data_folder
from ..data.order import Splits
from .language import Windows


@dataclass(frozen=True)
class Text(Windows):
    """The first nine tenths of the file are for training, then half a tenth each for validation and test.

    Args:
        d, layers, heads, context, dropout: of the GPT.
        file: its name in the data folder. Without one the folder is the file itself, or has a single one.

    >>> Text(d=64, layers=2, heads=2, context=32).build()(torch.zeros(1, 32, dtype=torch.long)).shape
    torch.Size([1, 32, 256])
    """

    name = "text"
    measure = "loss"
    vocabulary = 256

    file: str = ""

    def load(self, folder: Path | None) -> Splits:
        path = self._path(data_folder(folder, self.name, "a text file, or a folder with one"))
        text = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
        parts = text.tensor_split([len(text) * 90 // 100, len(text) * 95 // 100])
        if min(map(len, parts)) <= self.context:
            raise ValueError(
                f"{path}: {len(text):,} bytes are too few; a twentieth must be more than the context, {self.context}"
            )
        return Splits({name: (part,) for name, part in zip(("train", "valid", "test"), parts, strict=True)})

    def _path(self, folder: Path) -> Path:
        if folder.is_file():
            return folder
        if self.file:
            if not (folder / self.file).is_file():
                raise ValueError(f"text: there is no file {self.file} in {folder}")
            return folder / self.file
        files = sorted(folder.glob("*.txt"))
        if len(files) != 1:
            some = f"{len(files)} text files" if files else "no .txt file"
            raise ValueError(f"text: {folder} has {some}; give --data FILE, or text:file=NAME")
        return files[0]
