"""`bleu`: corpus BLEU by sacrebleu, or by an equal implementation where it is not installed."""

import html
import importlib
import math
import re
from collections import Counter
from collections.abc import Sequence

MAX_ORDER = 4
# Tokenization of mteval-v13a: punctuation is split off, except dots, commas and dashes inside numbers.
_RULES = [
    (re.compile(r"([{-~\[-` -&(-+:-@/])"), r" \1 "),
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
]


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, from 0 to 100, with one reference per translation.

    >>> bleu(["a man sleeps on a green sofa ."], ["a man sleeps on a red sofa ."])
    59.46
    """
    try:
        sacrebleu = importlib.import_module("sacrebleu")
    except ImportError:
        return own_bleu(translations, references)
    return float(sacrebleu.corpus_bleu(list(translations), [list(references)]).score)


def own_bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Same as `bleu`, without sacrebleu.

    >>> own_bleu(["a man sleeps ."], ["a man sleeps ."])
    100.0
    """
    if len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations, but {len(references)} references")
    matches, counts = [0] * MAX_ORDER, [0] * MAX_ORDER
    length = reference_length = 0
    for pair in zip(translations, references, strict=True):
        tokens, reference_tokens = map(tokenize, pair)
        length += len(tokens)
        reference_length += len(reference_tokens)
        for i in range(MAX_ORDER):
            ngrams, reference_ngrams = _ngrams(tokens, i + 1), _ngrams(reference_tokens, i + 1)
            matches[i] += (ngrams & reference_ngrams).total()
            counts[i] += ngrams.total()
    if not matches[0]:
        return 0.0
    log_precisions, unmatched = [], 0
    for matched, count in zip(matches, counts, strict=True):
        if not count:
            return 0.0
        # Exponential smoothing: each order without a match counts half of the previous one.
        unmatched += not matched
        log_precisions.append(math.log(matched / count if matched else 1 / (2**unmatched * count)))
    brevity = min(0.0, 1 - reference_length / length)
    return 100 * math.exp(brevity + sum(log_precisions) / MAX_ORDER)


def tokenize(text: str) -> list[str]:
    """Split a sentence into tokens by the rules of mteval-v13a.

    >>> tokenize("It's 1,000.5 km, or more...")
    ["It's", '1,000.5', 'km', ',', 'or', 'more', '.', '.', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity in ("&quot;", "&amp;", "&lt;", "&gt;"):
        text = text.replace(entity, html.unescape(entity))
    text = f" {text} "
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.split()


def _ngrams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
