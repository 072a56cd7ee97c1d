"""`Entry`: a method of a bench: a way to train and, behind an @, an optimizer of its own: `dense@lars=1.6`."""

from __future__ import annotations

from dataclasses import dataclass

from ..tasks.task import OPTIMIZERS, Recipe
from ..train.choice import Choice, choice
from ..train.optimizer import with_optimizer


@dataclass(frozen=True)
class Entry:
    """What becomes of the model and its gradients, and who updates it.

    Args:
        optimizer, lr: in place of the recipe's.
    """

    choice: Choice
    optimizer: str | None = None
    lr: float | None = None

    def recipe(self, usual: Recipe) -> Recipe:
        """The numbers that it is trained by."""
        return with_optimizer(usual, self.optimizer, self.lr) if self.optimizer else usual


def entry(text: str) -> Entry:
    """Read what `choice` reads, and after an @ an optimizer, with its learning rate if that is of another size.

    >>> entry("pufferfish+powersgd-4@lars=1.6")
    Entry(choice=Choice(name='pufferfish+powersgd-4', ...), optimizer='lars', lr=1.6)
    >>> entry("dense@lion")
    Traceback (most recent call last):
    ValueError: method 'dense@lion': after the @ comes sgd, adam, adamw, lars, lamb or sam, and =LR where it needs one
    """
    word, at, rest = text.rpartition("@")
    if not at or "/" in rest or ":" in rest:  # an @ of a path
        return Entry(choice(text))
    name, equals, number = rest.partition("=")
    try:
        lr = float(number) if equals else None
    except ValueError:
        name = ""
    if name not in OPTIMIZERS:
        there = f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"
        raise ValueError(f"method {text!r}: after the @ comes {there}, and =LR where it needs one")
    return Entry(choice(word), name, lr)
