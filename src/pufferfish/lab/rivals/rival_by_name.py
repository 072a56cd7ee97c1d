"""Rivals by their names: `lottery-ticket-9`, `early-bird-0.5`."""

from __future__ import annotations

import re

from torch import nn

from ...optim.carry import Optimizers
from .rival import EarlyBirdRun, LotteryRun, Rival

__all__ = ["RIVALS", "EarlyBirdRun", "LotteryRun", "Rival", "is_rival", "make"]

#: Each with what a number after it means, as in early-bird-0.3.
RIVALS = {"lottery-ticket": "how many rounds of pruning", "early-bird": "the share of channels to remove"}


def is_rival(word: str) -> bool:
    """Whether `word` names one; a ValueError if it does with a number that makes no sense.

    >>> is_rival("early-bird-0.3"), is_rival("lottery-ticket"), is_rival("pufferfish")
    (True, True, False)
    """
    return _parsed(word) is not None


def make(word: str, model: nn.Module, optimizer: Optimizers, *, epochs: int, an_epoch: int) -> Rival:
    """The rival of that name for a recipe of `epochs` of `an_epoch` updates: "lottery-ticket-9", "early-bird-0.5"."""
    parsed = _parsed(word)
    if parsed is None:
        raise ValueError(f"{word!r} is none of {', '.join(RIVALS)}")
    name, number = parsed
    if name == "lottery-ticket":
        return LotteryRun(model, optimizer, epochs=epochs, an_epoch=an_epoch, rounds=int(number or 5))
    return EarlyBirdRun(model, optimizer, epochs=epochs, an_epoch=an_epoch, ratio=number or 0.5)


def _parsed(word: str) -> tuple[str, float | None] | None:
    found = re.fullmatch(rf"({'|'.join(RIVALS)})(?:-([\d.]+))?", word)
    if found is None:
        return None
    name, text = found.groups()
    if text is None:
        return name, None
    whole = name == "lottery-ticket"
    number = float(text) if re.fullmatch(r"\d*\.?\d+", text) else 0.0
    if not (number >= 1 and number.is_integer() if whole else 0 < number < 1):
        example = "lottery-ticket-5" if whole else "early-bird-0.5"
        raise ValueError(f"{word!r}: after {name}- write {RIVALS[name]}, as in {example}")
    return name, number
