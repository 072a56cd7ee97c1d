"""`BenchMethod`: a training method and, after an @, an optimizer of its own: `dense@lars=1.6`."""

from dataclasses import dataclass

from ..tasks.recipe import OPTIMIZERS, Recipe
from ..train.build_optimizer import with_optimizer
from ..train.training_method import TrainingMethod, training_method


@dataclass(frozen=True)
class BenchMethod:
    """A training method with its optimizer and learning rate, which replace the recipe's."""

    method: TrainingMethod
    optimizer: str | None = None
    lr: float | None = None

    def recipe(self, default: Recipe) -> Recipe:
        """The recipe with the optimizer and learning rate of this method."""
        return with_optimizer(default, self.optimizer, self.lr) if self.optimizer else default


def bench_method(text: str) -> BenchMethod:
    """Parse a training method, optionally followed by @OPTIMIZER or @OPTIMIZER=LR.

    >>> bench_method("pufferfish+powersgd-4@lars=1.6")
    BenchMethod(method=TrainingMethod(name='pufferfish+powersgd-4', ...), optimizer='lars', lr=1.6)
    >>> bench_method("dense@lion")
    Traceback (most recent call last):
    ValueError: method 'dense@lion': expected sgd, adam, adamw, muon, lars, lamb or sam after the @, optionally with =LR
    """
    word, at, suffix = text.rpartition("@")
    if not at or "/" in suffix or ":" in suffix:  # an @ in a path
        return BenchMethod(training_method(text))
    name, equals, number = suffix.partition("=")
    try:
        lr = float(number) if equals else None
    except ValueError:
        name = ""
    if name not in OPTIMIZERS:
        known = f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"
        raise ValueError(f"method {text!r}: expected {known} after the @, optionally with =LR")
    return BenchMethod(training_method(word), name, lr)
