"""`Recipe`: the hyperparameters of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

SCHEDULES = ("linear", "cosine", "steps", "inverse-sqrt", "plateau")
OPTIMIZERS = ("sgd", "adam", "adamw", "muon", "lars", "lamb", "sam")

#: Optimizers that use the same learning rates as another one.
_SAME_RATES = {"sam": "sgd", "adamw": "adam", "muon": "adam"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training run; `dataclasses.asdict` converts it to JSON.

    After the warm-up, the schedules "linear" and "cosine" decay to `floor`, "steps" multiplies by 0.1 at each
    of `milestones`, "inverse-sqrt" decays with the square root of the step, and "plateau" is constant until
    the training loop multiplies it by `plateau` after an epoch without improvement in validation.

    >>> short = Recipe(epochs=10, batch=32, lr=0.4, warm_up=0.2)
    >>> [round(short.lr_at(step, 10), 2) for step in (0, 1, 2, 6, 9)]
    [0.2, 0.4, 0.4, 0.2, 0.05]
    """

    epochs: int
    batch: int  # global batch size, over all workers
    lr: float  # peak learning rate; see `lr_at`
    schedule: str = "linear"
    warm_up: float = (
        0.0  # fraction of the run in which lr rises linearly from 0; above 1 it never reaches `lr`
    )
    floor: float = 0.0  # final learning rate as a fraction of `lr`
    milestones: tuple[float, ...] = ()  # fractions of the run
    plateau: float = 0.25  # factor of the "plateau" schedule
    optimizer: str = "sgd"  # or "adam", "adamw", "muon" (with AdamW), "lars", "lamb", "sam" (with SGD)
    momentum: float = 0.9  # for SGD, LARS and SAM
    nesterov: bool = False  # for SGD, LARS and SAM
    betas: tuple[float, float] = (0.9, 0.999)  # for Adam, AdamW (also beside Muon) and LAMB
    trust: float = 0.01  # trust coefficient η of LARS
    rho: float = 0.05  # neighborhood size ρ of SAM
    weight_decay: float = 0.0  # of matrices and filters
    decay_vectors: bool = False  # apply `weight_decay` to vectors, too
    label_smoothing: float = 0.0  # as in `torch.nn.functional.cross_entropy`
    clip: float | None = None  # maximum gradient norm; None disables clipping
    switch_at: int | None = None  # epochs of full-rank warm-up
    switch_lr: float = 1.0  # factor on the learning rate after the switch
    rank: float = 0.25  # fraction of the full rank after the switch

    def __post_init__(self) -> None:
        checks = {
            "epochs": (self.epochs >= 1, "1 or more"),
            "batch": (self.batch >= 1, "1 or more"),
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "schedule": (self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "trust": (self.trust > 0, "a positive number"),
            "rho": (self.rho > 0, "a positive number"),
            "warm_up": (self.warm_up >= 0, "a fraction of the run, 0 or more"),
            "floor": (0 <= self.floor <= 1, "a fraction of lr, between 0 and 1"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "between 0 and 1"),
            "clip": (self.clip is None or self.clip > 0, "a positive number or None"),
        }
        for name, (valid, requirement) in checks.items():
            if not valid:
                raise ValueError(f"Recipe: {name}={getattr(self, name)!r} must be {requirement}")
        if self.schedule == "inverse-sqrt" and not self.warm_up:
            raise ValueError("Recipe: schedule='inverse-sqrt' needs warm_up > 0")

    def changed(self, text: str, *, epochs: int | None = None, batch: int | None = None) -> Recipe:
        """Return a copy with the values of a text such as `optimizer=muon,rank=0.33`.

        With other epochs, `switch_at` is scaled, unless the text sets it. `epochs` and `batch` take precedence over those
        of the text.

        >>> Recipe(epochs=12, batch=32, lr=0.1, switch_at=4).changed("epochs=6,nesterov=true,clip=none").switch_at
        2
        >>> Recipe(epochs=12, batch=32, lr=0.1).changed("rate=1")
        Traceback (most recent call last):
        ValueError: 'rate=1' is not a value of a recipe; choose from epochs, batch, lr, schedule, ...
        """
        kinds = {f.name: str(f.type) for f in fields(self) if not str(f.type).startswith("tuple")}
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"{part!r} is not a value of a recipe; choose from {', '.join(kinds)}")
            values[name] = _parse_value(kinds[name], part, value)
        given = {"epochs": epochs, "batch": batch}
        values |= {name: value for name, value in given.items() if value is not None}
        if self.switch_at and "epochs" in values:
            values.setdefault("switch_at", max(round(self.switch_at * values["epochs"] / self.epochs), 1))
        if "optimizer" in values:
            values["lr"] = self.with_optimizer(values["optimizer"], values.get("lr")).lr
        return replace(self, **values)

    def with_optimizer(self, name: str, lr: float | None = None) -> Recipe:
        """Return the recipe with another optimizer and learning rate.

        Args:
            lr: required if the recipe's learning rate does not fit the optimizer.

        >>> Recipe(epochs=1, batch=1, lr=0.1).with_optimizer("sam").lr
        0.1
        >>> Recipe(epochs=1, batch=1, lr=0.1).with_optimizer("lars")
        Traceback (most recent call last):
        ValueError: optimizer lars: give its lr, too, as in dense(optimizer=lars,lr=1.6); the recipe's 0.1 is for sgd, ...
        """
        changed = replace(self, optimizer=name, lr=self.lr if lr is None else lr)
        if lr is None and _SAME_RATES.get(name, name) != _SAME_RATES.get(self.optimizer, self.optimizer):
            raise ValueError(
                f"optimizer {name}: give its lr, too, as in dense(optimizer={name},lr=1.6); the recipe's {self.lr:g} is for "
                f"{self.optimizer}, whose rates have another scale"
            )
        return changed

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update `step`, counted from 0, in a run of `steps` updates."""
        warm_up = self.warm_up * steps
        up = min((step + 1) / warm_up, 1.0) if warm_up else 1.0
        past = (step - warm_up) / max(steps - warm_up, 1.0)  # fraction of the run after the warm-up
        if self.schedule == "linear":
            factor = min(up, self.floor + (1 - self.floor) * (1 - max(past, 0.0)))
        elif self.schedule == "cosine":
            factor = min(up, self.floor + (1 - self.floor) * (1 + math.cos(math.pi * max(past, 0.0))) / 2)
        elif self.schedule == "steps":
            factor = up * 0.1 ** sum(step >= milestone * steps for milestone in self.milestones)
        elif self.schedule == "inverse-sqrt":
            factor = min(up, math.sqrt(warm_up / (step + 1)))
        else:
            factor = up
        return self.lr * factor


def _parse_value(kind: str, part: str, text: str) -> Any:
    """A value of the type that `kind` names."""
    kind, *optional = kind.split(" | ")
    if kind == "str":
        return text
    if optional and text == "none":
        return None
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if kind == "int" else float(text if kind == "float" else "")
    except ValueError:
        known = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ValueError(f"{part!r}: must be {known}{' or none' * bool(optional)}") from None
