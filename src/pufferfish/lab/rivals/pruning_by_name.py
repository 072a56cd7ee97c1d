"""`build_pruning_change`: pruning methods by their names: `lottery-ticket-9`, `early-bird-0.5`."""

import re

from torch import nn

from ...lowrank.optimizers import Optimizers
from .pruning_change import EarlyBirdChange, LotteryTicketChange, PruningChange

#: Names, and the meaning of a number after them, as in early-bird-0.3.
PRUNING_METHODS = {
    "lottery-ticket": "how many rounds of pruning",
    "early-bird": "the share of channels to remove",
}


def is_pruning_method(text: str) -> bool:
    """Whether `text` names a pruning method; raises ValueError if its number is invalid.

    >>> is_pruning_method("early-bird-0.3"), is_pruning_method("lottery-ticket"), is_pruning_method("pufferfish")
    (True, True, False)
    """
    return _parse(text) is not None


def build_pruning_change(
    text: str, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int
) -> PruningChange:
    """Build the pruning method of that name, such as "lottery-ticket-9", for a recipe of `epochs`."""
    parsed = _parse(text)
    assert parsed is not None  # callers ask `is_pruning_method`
    name, number = parsed
    length = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    if name == "lottery-ticket":
        return LotteryTicketChange(model, optimizer, **length, rounds=int(number or 5))
    return EarlyBirdChange(model, optimizer, **length, ratio=number or 0.5)


def _parse(text: str) -> tuple[str, float | None] | None:
    """Return name and number, or None for another method."""
    match = re.fullmatch(rf"({'|'.join(PRUNING_METHODS)})(?:-([\d.]+))?", text)
    if match is None:
        return None
    name, digits = match.groups()
    if digits is None:
        return name, None
    counts_rounds = name == "lottery-ticket"
    number = float(digits) if re.fullmatch(r"\d*\.?\d+", digits) else 0.0
    if not (number >= 1 and number.is_integer() if counts_rounds else 0 < number < 1):
        example = "lottery-ticket-5" if counts_rounds else "early-bird-0.5"
        raise ValueError(f"{text!r}: after {name}- write {PRUNING_METHODS[name]}, as in {example}")
    return name, number
