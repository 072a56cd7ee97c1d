"""`bleu`: corpus BLEU by sacrebleu."""

import importlib
from collections.abc import Sequence
from typing import Any


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, from 0 to 100, with one reference per translation.

    >>> bleu(["a man sleeps on a green sofa ."], ["a man sleeps on a red sofa ."])
    59.46
    """
    return float(require_sacrebleu().corpus_bleu(list(translations), [list(references)]).score)


def require_sacrebleu() -> Any:
    """Import sacrebleu, or say how to install it."""
    try:
        return importlib.import_module("sacrebleu")
    except ImportError:
        raise ImportError("multi30k is scored by the package sacrebleu: pip install sacrebleu") from None
