"""`LowRankMethod`: training through the switch to low rank, with options: `pufferfish(at=0,frobenius=5e-4)`, `auto(back=0.9)`."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...lowrank.rewrite import check_plan
from ...planning.plan import Plan
from ...planning.plan import plan as make_plan
from ...switching.moments import AtEpoch, AtFraction
from ...switching.switch import Switch
from ..tasks import Recipe

#: Low rank by the paper's recipe; low rank chosen from the weights.
LOW_RANK = ("pufferfish", "auto")


@dataclass(frozen=True, kw_only=True)
class LowRankMethod:
    """How the model becomes low-rank.

    Args:
        automatic: moment and ranks are those of `Switch()`; otherwise those of the recipe.
        rank: fraction of the full rank; None: the recipe's.
        at: moment of the switch, a fraction of the run; None: the recipe's.
        keep: patterns of the layers that stay dense; None: the task's.
        frobenius: strength of the Frobenius decay of the low-rank layers; 0: none.
        back: moment at which the model becomes dense again, a fraction of the run; None: never.
        plan: file of a plan, instead of `rank` and `keep`.
    """

    automatic: bool = False
    rank: float | None = None
    at: float | None = None
    keep: tuple[str, ...] | None = None
    frobenius: float = 0.0
    back: float | None = None
    plan: Path | None = None

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch:
        """Build the `Switch`.

        Args:
            keep: the task's patterns of layers that stay dense.
        """
        settings: dict[str, Any] = {"lr": recipe.switch_lr} if recipe.switch_lr != 1 else {}
        if self.back is not None:
            settings["back"] = AtFraction(self.back)
        if self.automatic:
            return Switch(**settings)
        epoch = recipe.epochs // 3 if recipe.switch_at is None else recipe.switch_at
        if self.at is not None:
            epoch = round(self.at * recipe.epochs)
        when = AtEpoch(min(epoch, recipe.epochs - 1))
        if self.plan is not None:
            return Switch(Plan.load(self.plan), when=when, **settings)
        return Switch(rank=self.rank_of(recipe), keep=self.kept(keep), when=when, **settings)

    def make_plan(self, model: nn.Module, recipe: Recipe, keep: Sequence[str]) -> Plan:
        """The plan for a model: that of the file, or one by rank and patterns. Raises ValueError if it does not fit the model."""
        if self.plan is None:
            return make_plan(model, self.rank_of(recipe), keep=self.kept(keep))
        loaded = Plan.load(self.plan)
        try:
            check_plan(model, loaded)
        except ValueError as error:
            raise ValueError(f"{self.plan} is a plan for another model: {error}") from None
        return loaded

    @property
    def plan_identity(self) -> str | None:
        """Name of the plan's file, with a checksum of its text; None without a file."""
        if self.plan is None:
            return None
        return f"{self.plan.name}@{hashlib.sha256(self.plan.read_bytes()).hexdigest()[:12]}"

    def rank_of(self, recipe: Recipe) -> float:
        """Fraction of the full rank."""
        return recipe.rank if self.rank is None else self.rank

    def kept(self, keep: Sequence[str]) -> Sequence[str]:
        """Patterns of the layers that stay dense, given those of the task."""
        if self.automatic:
            return ()
        return keep if self.keep is None else self.keep


def low_rank_method(text: str) -> LowRankMethod | None:
    """Parse `pufferfish` and `auto`, also with options in brackets. Returns None for other methods.

    Patterns in `keep` are separated by |.

    >>> low_rank_method("pufferfish(at=0, keep=conv1|fc)")
    LowRankMethod(automatic=False, rank=None, at=0.0, keep=('conv1', 'fc'), frobenius=0.0, back=None, plan=None)
    >>> low_rank_method("auto(at=0.5)")
    Traceback (most recent call last):
    ValueError: 'auto(at=0.5)': at=0.5 is not an option of auto; choose from frobenius, back
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if match is None or match[1] not in LOW_RANK:
        return None
    automatic = match[1] == "auto"
    names = ("frobenius", "back") if automatic else ("rank", "at", "keep", "plan", "frobenius", "back")
    options: dict[str, Any] = {}
    for part in filter(None, (match[2] or "").split(",")):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in names:
            raise ValueError(
                f"{text!r}: {part.strip()} is not an option of {match[1]}; choose from {', '.join(names)}"
            )
        if name == "plan":
            options[name] = Path(value)
        elif name == "keep":
            options[name] = tuple(filter(None, value.split("|")))
        else:
            options[name] = _number(text, name, value)
    if "plan" in options and ("rank" in options or "keep" in options):
        raise ValueError(f"{text!r}: the plan has layers and ranks; remove rank= and keep=, or plan=")
    return LowRankMethod(automatic=automatic, **options)


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    valid = number >= 0 if name == "frobenius" else 0 <= number < 1 if name == "at" else 0 < number < 1
    if not valid:
        needed = "a number of at least 0" if name == "frobenius" else "a fraction between 0 and 1"
        raise ValueError(f"{text!r}: {name}={value} must be {needed}")
    return number
