"""`TrainingMethod`: a method parsed from text such as `dense`, `bf16`, `pufferfish`, `auto+powersgd-4`, `diloco-30`, `file.py:Mine(rank=2)`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compression import Method
from ...compression.parse_method import method_classes, parse_method
from ...switching.moments import AtEpoch
from ...switching.switch import Switch
from ..rivals.pruning_by_name import PRUNING_METHODS, is_pruning_method
from ..tasks import Recipe
from .local_method import LOCAL_METHODS, LocalMethod, is_local_method, local_method
from .narrow_method import NarrowMethod, narrow_method

#: Unchanged model; low rank by the paper's recipe; low rank chosen from the weights.
MODELS = ("dense", "pufferfish", "auto")
_SHORT = {"bf16": "BFloat16", "fp16": "Float16", "int8": "BlockInt8", "fp8": "BlockFP8"}


@dataclass(frozen=True)
class TrainingMethod:
    """How a run changes the model, and how its workers exchange what they learn.

    Args:
        name: text that was parsed.
        model: "dense", "pufferfish", "auto", a pruning method such as "early-bird-0.5", or a `NarrowMethod`.
        compress: gradient compression; None uses plain DDP.
        local: local steps, which replace DDP, or None.

    >>> training_method("auto+powersgd-4")
    TrainingMethod(name='auto+powersgd-4', model='auto', compress=PowerSGD(rank=4), local=None)
    """

    name: str
    model: str = "dense"
    compress: Method | None = None
    local: LocalMethod | None = None

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
    """Parse `text`: a model, then local steps, then a compression method, each optional, joined by +.

    >>> training_method("bf16").compress, training_method("topk-0.01").compress, training_method("pufferfish").model
    (BFloat16(), TopK(k=0.01, sample=1.0), 'pufferfish')
    >>> training_method("early-bird-0.5+powersgd-4")
    TrainingMethod(name='early-bird-0.5+powersgd-4', model='early-bird-0.5', compress=PowerSGD(rank=4), local=None)
    >>> training_method("pufferfish+diloco-30+int4").local
    LocalMethod(h=30, fragments=1, delay=0, mixing=None, lr=0.7, momentum=0.9, compress=Int4(...))
    >>> training_method("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh; there are dense, pufferfish, auto, ...
    """
    model, plus, exchange = text.strip().partition("+")
    if not (model in MODELS or is_pruning_method(model) or narrow_method(model)):
        model, exchange = "dense", text.strip()
    elif not exchange:
        if plus:
            raise ValueError(f"{text!r}: a compression method follows the +, such as {model}+powersgd-4")
        return TrainingMethod(text, model)
    if not is_local_method(exchange):
        return TrainingMethod(text, model, _compression(exchange, text))
    if is_pruning_method(model):
        raise ValueError(f"method {text!r}: {model} cannot be combined with local steps")
    return TrainingMethod(text, model, local=local_method(exchange, lambda word: _compression(word, text)))


def _compression(word: str, text: str) -> Method:
    """Parse a compression method, also in lower case with its first setting after a hyphen."""
    short = re.fullmatch(r"([a-z][a-z0-9]*)(?:-([\d.]+))?", word)
    if short is None:
        return parse_method(word)
    names = {name.lower(): name for name in method_classes()} | _SHORT
    if short[1] not in names:
        examples = ", ".join(
            [*MODELS, "narrow", *PRUNING_METHODS, *LOCAL_METHODS, *_SHORT, "powersgd-4", "topk-0.01"]
        )
        raise ValueError(
            f"method {text!r}: there is no {short[1]}; there are {examples} … (`pufferfish methods`)"
        )
    return parse_method(names[short[1]] + (f"({short[2]})" if short[2] else ""))
