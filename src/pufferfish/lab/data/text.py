"""Text as tokens: bytes, a tokenizer, byte pairs, windows and columns."""

from __future__ import annotations

import hashlib
import heapq
import importlib
import math
import os
import re
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .batches import Splits

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


#: Version of the way from a text to its tokens; another one does not use the cached tokens.
_FORMAT = 1
#: Characters that are encoded at once, up to the end of a line, and parts that are encoded in parallel.
_PART, _PARTS = 1 << 20, 16
#: Characters that are decoded again, to see whether the tokenizer loses something.
_SAMPLE = 100_000


def vocabulary_size(path: Path) -> int:
    """Number of token ids of a `tokenizer.json`, those of added tokens included."""
    return _read_tokenizer(path).size


def tokenize(text: bytes, path: Path, source: str) -> TextSplits:
    """Split a text by position and encode each split with the `tokenizer.json` at `path`.

    Special tokens are not added, and a truncation or padding that the file asks for is turned off.

    Args:
        source: of the text, for errors.
    """
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 text (invalid byte {error.start:,})") from None
    tokenizer = _read_tokenizer(path)
    texts = split_characters(text)
    _warn_if_lossy(tokenizer.encoder, texts["train"][:_SAMPLE].decode(errors="ignore"), path)
    key = f"{_FORMAT} {tokenizer.digest} {hashlib.sha256(text).hexdigest()} {_package().__version__}"
    cached = _cache_folder() / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    tokens = _read_cached(cached)
    if tokens is None:
        tokens = {split: _encode(tokenizer, part.decode()) for split, part in texts.items()}
        _write_cached(cached, tokens)
    return TextSplits(tokens, {split: len(part) for split, part in texts.items()})


def _package() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ImportError(
            "the option tokenizer of the text task needs tokenizers: pip install tokenizers"
        ) from None


@dataclass(frozen=True)
class _Tokenizer:
    encoder: Any  # a tokenizers.Tokenizer
    size: int  # of its vocabulary
    digest: str  # of its file


def _read_tokenizer(path: Path) -> _Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"tokenizer {path}: no such file; give the path of a tokenizer.json, or tokenizer=bytes"
        )
    try:
        return _parse_tokenizer(path.read_bytes())
    except (OSError, ImportError):
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"tokenizer {path}: not a usable tokenizer.json ({line})") from None


@lru_cache(maxsize=1)  # the same file is read each time that a model is built
def _parse_tokenizer(data: bytes) -> _Tokenizer:
    encoder = _package().Tokenizer.from_buffer(data)
    encoder.no_truncation()
    encoder.no_padding()
    ids = encoder.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ValueError("it has no tokens; train it first")
    return _Tokenizer(encoder, 1 + max(ids), hashlib.sha256(data).hexdigest())  # ids may have gaps


def _encode(tokenizer: _Tokenizer, text: str) -> Tensor:
    dtype = next(d for d in (np.uint8, np.int16, np.int32) if tokenizer.size <= np.iinfo(d).max + 1)
    parts, ids = list(_parts(text)), []
    for i in range(0, len(parts), _PARTS):
        encodings = tokenizer.encoder.encode_batch_fast(parts[i : i + _PARTS], add_special_tokens=False)
        ids += [np.array(encoding.ids, dtype) for encoding in encodings]
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *ids]))


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PART) + 1 or len(text)
        yield text[start:end]
        start = end


def _warn_if_lossy(encoder: Any, sample: str, path: Path) -> None:
    ids = encoder.encode(sample, add_special_tokens=False).ids
    # Some tokenizers add a space in front, or write line ends as spaces.
    if encoder.decode(ids, skip_special_tokens=False).split() != sample.split():
        warnings.warn(
            f"tokenizer {path}: decoding its tokens does not give the text back, so its bits per byte are too low "
            "to be compared with those of other tokenizers",
            stacklevel=2,
        )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pufferfish"


def _read_cached(path: Path) -> dict[str, Tensor] | None:
    """The tokens in a file of the cache; None if it does not exist or is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None


def _write_cached(path: Path, tokens: dict[str, Tensor]) -> None:
    """Write a file of the cache by atomic replacement: several workers may do so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            save_file(tokens, Path(folder) / path.name)
            (Path(folder) / path.name).replace(path)
    except (OSError, SafetensorError):
        pass  # without a cache, the text is encoded again


def to_columns(tokens: Tensor, n: int) -> Tensor:
    """Reshape a sequence to `n` columns of equal length (time, n); the remainder is dropped.

    >>> import torch
    >>> to_columns(torch.arange(7), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    rows = len(tokens) // n
    if rows < 2:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for {n} columns")
    return tokens[: rows * n].view(n, rows).t().contiguous()


def to_windows(tokens: Tensor, length: int, first: int = 0) -> Tensor:
    """View of consecutive windows of `length` tokens, each with the token that follows it, starting at `first`.

    >>> import torch
    >>> to_windows(torch.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) - first <= length:
        raise ValueError(f"a text of {len(tokens):,} tokens is too short for windows of {length:,}")
    return tokens[first:].unfold(0, length + 1, length)


PADDING, BEGIN, END, UNKNOWN = range(4)
_SPECIAL = ("<pad>", "<s>", "</s>", "�")
_WORD = re.compile(r" \w+| ?[^\w\s]+|\w+")

Pair = tuple[str, str]


class BPE:
    """Byte-pair encoding: the characters of the training text, and pairs of pieces to merge, in order.

    A word includes the space before it, so the concatenated pieces are the text.

    >>> bpe = BPE.learn(["low lower lowest"] * 5, size=13)
    >>> bpe.pieces[4:]
    [' ', 'e', 'l', 'o', 'r', 's', 't', 'w', ' l']
    >>> bpe.decode(bpe.encode("lower slow!"))
    'lower slow�'
    """

    def __init__(self, letters: Iterable[str], merges: Sequence[Pair]) -> None:
        self.pieces = [*_SPECIAL, *sorted(letters), *(a + b for a, b in merges)]
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._priority = {pair: i for i, pair in enumerate(merges)}
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> BPE:
        """Learn an encoding with `size` pieces, or fewer if no pairs are left, by merging the most frequent pair repeatedly.

        Ties are broken alphabetically, so that the result is the same on every machine.
        """
        counts = Counter(word for text in texts for word in _words(text))
        words = [list(word) for word in counts]
        frequencies = list(counts.values())
        letters = {letter for word in counts for letter in word}
        pairs: Counter[Pair] = Counter()
        occurrences: dict[Pair, set[int]] = defaultdict(set)
        for i, word in enumerate(words):
            for pair in pairwise(word):
                pairs[pair] += frequencies[i]
                occurrences[pair].add(i)
        heap = [(-n, pair) for pair, n in pairs.items()]
        heapq.heapify(heap)
        merges: list[Pair] = []
        while heap and len(_SPECIAL) + len(letters) + len(merges) < size:
            n, best = heapq.heappop(heap)
            if -n != pairs[best]:  # stale: the pair was pushed again when its count changed
                continue
            merges.append(best)
            changed: Counter[Pair] = Counter()
            for i in occurrences.pop(best):
                for pair in pairwise(words[i]):
                    changed[pair] -= frequencies[i]
                words[i] = _merge(words[i], best)
                for pair in pairwise(words[i]):
                    changed[pair] += frequencies[i]
                    occurrences[pair].add(i)
            for pair, change in changed.items():
                pairs[pair] += change
                if change and pairs[pair] > 0:
                    heapq.heappush(heap, (-pairs[pair], pair))
        return cls(letters, merges)

    def encode(self, text: str) -> list[int]:
        """Piece ids of a text; characters that are not in the training text become `UNKNOWN`."""
        return [i for word in _words(text) for i in self._encode_word(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of piece ids, without padding, begin and end. Ids out of range become `UNKNOWN`."""
        known = (i if i < len(self.pieces) else UNKNOWN for i in ids)
        return "".join(self.pieces[i] for i in known if i >= UNKNOWN).strip()

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._cache:
            parts = list(word)
            while len(parts) > 1:
                best = min(pairwise(parts), key=lambda pair: self._priority.get(pair, len(self._priority)))
                if best not in self._priority:
                    break
                parts = _merge(parts, best)
            self._cache[word] = [self._ids.get(part, UNKNOWN) for part in parts]
        return self._cache[word]


def _words(text: str) -> list[str]:
    """Words and punctuation, each with the space before it."""
    return _WORD.findall(" " + text)


def _merge(parts: list[str], pair: Pair) -> list[str]:
    """Replace every occurrence of `pair` by its concatenation, from left to right."""
    merged, i = [], 0
    while i < len(parts):
        both = parts[i] == pair[0] and parts[i + 1 : i + 2] == [pair[1]]
        merged.append(pair[0] + pair[1] if both else parts[i])
        i += 2 if both else 1
    return merged
