"""`TextSplits`: a text as three sequences of tokens, and the sizes of their texts in bytes."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .splits import Splits

#: Where each split begins, in per cent of the text.
STARTS = {"train": 0, "valid": 90, "test": 95}


class TextSplits(Splits):
    """One sequence of tokens per split, with the size in bytes of the text that it stands for.

    >>> data = TextSplits({"test": torch.tensor([7, 300])}, {"test": 8})
    >>> data.bits_per_byte("test", loss=8 * math.log(2))
    2.0
    """

    def __init__(self, tokens: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        super().__init__({split: (x,) for split, x in tokens.items()})
        self.sizes = dict(sizes)

    def bits_per_byte(self, split: str, loss: float) -> float:
        """Convert a loss in nats per token to bits per byte, which do not depend on the tokenizer."""
        return loss / math.log(2) * self.size(split) / self.sizes[split]


def split_bytes(text: bytes) -> TextSplits:
    """Split a text by position; each byte is a token.

    >>> [split_bytes(bytes(200)).size(split) for split in STARTS]
    [180, 10, 10]
    """
    tokens = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    parts = dict(zip(STARTS, tokens.tensor_split(_cuts(len(text))), strict=True))
    return TextSplits(parts, {split: len(x) for split, x in parts.items()})


def split_characters(text: bytes) -> dict[str, bytes]:
    """Split a UTF-8 text at the positions of `split_bytes`, or at the next beginning of a character.

    >>> [len(part) for part in split_characters("ä".encode() * 50).values()]
    [90, 6, 4]
    """
    cuts = [0, *_cuts(len(text)), len(text)]
    for i, cut in enumerate(cuts):
        while cut < len(text) and text[cut] & 0b1100_0000 == 0b1000_0000:  # a continuation byte
            cut += 1
        cuts[i] = cut
    return {split: text[cuts[i] : cuts[i + 1]] for i, split in enumerate(STARTS)}


def _cuts(size: int) -> list[int]:
    return [size * start // 100 for start in STARTS.values() if start]
