"""`Text`: any text file, byte by byte, with a small GPT or Llama."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.dataset import data_folder
from ..data.splits import Splits
from .gpt_task import GPTTask


@dataclass(frozen=True)
class Text(GPTTask):
    """A text file: the first 90 % are for training, the next 5 % for validation, the last 5 % for testing.

    By default, the data folder is the file or contains a single .txt file; `file` names one of several.

    >>> Text(d=64, layers=2, heads=2, context=32).build()(torch.zeros(1, 32, dtype=torch.long)).shape
    torch.Size([1, 32, 256])
    """

    name = "text"
    metric = "loss"
    vocabulary = 256

    file: str = ""

    def load(self, folder: Path | None) -> Splits:
        path = self._path(data_folder(folder, self.name, "a text file, or a folder with one"))
        text = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
        parts = text.tensor_split([len(text) * 90 // 100, len(text) * 95 // 100])
        if min(map(len, parts)) <= self.context:
            raise ValueError(
                f"{path}: {len(text):,} bytes are too few; 5 % of them must be more than the context of {self.context}"
            )
        return Splits({name: (part,) for name, part in zip(("train", "valid", "test"), parts, strict=True)})

    def _path(self, folder: Path) -> Path:
        if folder.is_file():
            return folder
        if self.file:
            if not (folder / self.file).is_file():
                raise ValueError(f"text: file {self.file} not found in {folder}")
            return folder / self.file
        files = sorted(folder.glob("*.txt"))
        if len(files) != 1:
            found = f"{len(files)} text files" if files else "no .txt file"
            raise ValueError(f"text: {folder} has {found}; use --data FILE or text:file=NAME")
        return files[0]
