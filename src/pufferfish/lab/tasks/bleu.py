"""BLEU of a corpus: sacrebleu's figure, by sacrebleu where it is installed, else by the same rules."""

from __future__ import annotations

import html
import importlib
import math
import re
from collections import Counter
from collections.abc import Sequence

ORDER = 4
# The tokens of mteval-v13a: punctuation on its own, but for dots, commas and dashes inside numbers.
_RULES = [
    (re.compile(r"([{-~\[-` -&(-+:-@/])"), r" \1 "),
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
]


def bleu(said: Sequence[str], meant: Sequence[str]) -> float:
    """From 0 to 100, of translations and one reference each.

    >>> bleu(["a man sleeps on a green sofa ."], ["a man sleeps on a red sofa ."])
    59.46
    """
    try:
        sacrebleu = importlib.import_module("sacrebleu")
    except ImportError:
        return own_bleu(said, meant)
    return float(sacrebleu.corpus_bleu(list(said), [list(meant)]).score)


def own_bleu(said: Sequence[str], meant: Sequence[str]) -> float:
    """As `bleu`, without sacrebleu.

    >>> own_bleu(["a man sleeps ."], ["a man sleeps ."])
    100.0
    """
    if len(said) != len(meant):
        raise ValueError(f"{len(said)} translations and {len(meant)} references")
    right, all_ = [0] * ORDER, [0] * ORDER
    said_words = meant_words = 0
    for pair in zip(said, meant, strict=True):
        a, b = map(words, pair)
        said_words += len(a)
        meant_words += len(b)
        for n in range(ORDER):
            here, there = _grams(a, n + 1), _grams(b, n + 1)
            right[n] += (here & there).total()
            all_[n] += here.total()
    if not right[0]:
        return 0.0
    logs, none = [], 0
    for matched, count in zip(right, all_, strict=True):
        if not count:
            return 0.0
        if not matched:
            none += 1  # each order without a match counts as half of the one before
        logs.append(math.log(matched / count if matched else 1 / (2**none * count)))
    brevity = min(0.0, 1 - meant_words / said_words)
    return 100 * math.exp(brevity + sum(logs) / ORDER)


def words(text: str) -> list[str]:
    """Tokens of a sentence.

    >>> words("It's 1,000.5 km, or more...")
    ["It's", '1,000.5', 'km', ',', 'or', 'more', '.', '.', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for name in ("&quot;", "&amp;", "&lt;", "&gt;"):
        text = text.replace(name, html.unescape(name))
    text = f" {text} "
    for pattern, spaced in _RULES:
        text = pattern.sub(spaced, text)
    return text.split()


def _grams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
