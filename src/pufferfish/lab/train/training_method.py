"""`TrainingMethod`: a method parsed from text such as `dense`, `bf16`, `powersgd-4`, `pufferfish`, `auto+powersgd-4`, `file.py:Mine(rank=2)`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compression import Method
from ...compression.parse_method import parse_method, short_form
from ...switching.moments import AtEpoch
from ...switching.switch import Switch
from ..rivals.pruning_by_name import PRUNING_METHODS, is_pruning_method
from ..tasks import Recipe
from .narrow_method import NarrowMethod, narrow_method

#: Unchanged model; low rank by the paper's recipe; low rank chosen from the weights.
MODELS = ("dense", "pufferfish", "auto")


@dataclass(frozen=True)
class TrainingMethod:
    """How a run changes the model and compresses its gradients.

    Args:
        name: text that was parsed.
        model: "dense", "pufferfish", "auto", a pruning method such as "early-bird-0.5", or a `NarrowMethod`.
        compress: gradient compression; None uses plain DDP.

    >>> training_method("auto+powersgd-4")
    TrainingMethod(name='auto+powersgd-4', model='auto', compress=PowerSGD(rank=4))
    """

    name: str
    model: str = "dense"
    compress: Method | None = None

    @property
    def narrow(self) -> NarrowMethod | None:
        """The narrower model that is trained; None for the task's own model."""
        return narrow_method(self.model)

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch | None:
        """Build the `Switch` to low rank, or return None if the method has none.

        Args:
            keep: names or patterns of layers that stay dense under "pufferfish".
        """
        if self.model not in ("pufferfish", "auto"):
            return None
        settings: dict[str, Any] = {"lr": recipe.switch_lr} if recipe.switch_lr != 1 else {}
        if self.model == "auto":
            return Switch(**settings)
        epoch = recipe.epochs // 3 if recipe.switch_at is None else recipe.switch_at
        return Switch(rank=recipe.rank, keep=keep, when=AtEpoch(min(epoch, recipe.epochs - 1)), **settings)


def training_method(text: str) -> TrainingMethod:
    """Parse `text`: a model, a compression method, or both joined by +.

    >>> training_method("bf16").compress, training_method("topk-0.01").compress, training_method("pufferfish").model
    (BFloat16(), TopK(k=0.01, sample=1.0), 'pufferfish')
    >>> training_method("early-bird-0.5+powersgd-4")
    TrainingMethod(name='early-bird-0.5+powersgd-4', model='early-bird-0.5', compress=PowerSGD(rank=4))
    >>> training_method("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh; there are dense, pufferfish, auto, ...
    """
    model, plus, compression = text.strip().partition("+")
    model = model.lower() if model.lower() in MODELS else model
    if model in MODELS or is_pruning_method(model) or narrow_method(model):
        if plus and not compression:
            raise ValueError(f"{text!r}: a compression method follows the +, such as {model}+powersgd-4")
        return TrainingMethod(text, model, _compression(compression, text) if compression else None)
    return TrainingMethod(text, compress=_compression(text.strip(), text))


def _compression(word: str, text: str) -> Method:
    if re.fullmatch(r"[\w.-]+", word) and short_form(word) is None:
        examples = ", ".join([*MODELS, "narrow", *PRUNING_METHODS, "bf16", "int8", "powersgd-4", "topk-0.01"])
        raise ValueError(
            f"method {text!r}: there is no {word}; there are {examples} … (`pufferfish methods`)"
        )
    return parse_method(word)
