"""`Enwik8`: 100 MB of English Wikipedia, byte by byte, with a GPT or Llama."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ..data.dataset import read_files
from ..data.enwik8 import DATASET, MD5, check_md5
from ..data.text import TextSplits, split_bytes
from .gpt_task import GPTTask
from .recipe import Recipe


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
    dataset = DATASET
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
        return split_bytes(check_md5(read_files(DATASET, folder)["enwik8"], self.md5))
