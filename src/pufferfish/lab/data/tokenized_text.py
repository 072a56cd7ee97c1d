"""`tokenize`: the tokens of a text by a `tokenizer.json`, kept in the user's cache folder."""

import hashlib
import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .text_splits import TextSplits, split_characters

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
