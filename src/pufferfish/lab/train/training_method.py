"""`TrainingMethod`: a method parsed from text such as `dense`, `bf16`, `pufferfish`, `auto+powersgd-4`, `diloco-30`, `file.py:Mine(rank=2)`."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...compression import Method, NoCompression, Settings
from ...compression.parse_method import parse_method, short_form
from ...switching.switch import Switch
from ..rivals.pruning_by_name import PRUNING_METHODS, is_pruning_method
from ..tasks import Recipe
from .local_method import LOCAL_METHODS, LocalMethod, is_local_method, local_method
from .low_rank_method import LOW_RANK, LowRankMethod, low_rank_method
from .narrow_method import NarrowMethod, narrow_method

#: Unchanged model; low rank by the paper's recipe; low rank chosen from the weights.
MODELS = ("dense", *LOW_RANK)
_GLOBAL = "global-"


@dataclass(frozen=True)
class TrainingMethod:
    """How a run changes the model, and how its workers exchange what they learn.

    Args:
        name: text that was parsed.
        model: "dense", "pufferfish" or "auto" with options, a pruning method such as "early-bird-0.5", or a `NarrowMethod`.
        compress: gradient compression; None uses plain DDP.
        scope: "layer"; "global": a sparsifier chooses among the elements of all tensors, as in `global-topk-0.01`.
        local: local steps, which replace DDP, or None.

    >>> training_method("auto+powersgd-4")
    TrainingMethod(name='auto+powersgd-4', model='auto', compress=PowerSGD(rank=4, start=0), scope='layer', local=None)
    """

    name: str
    model: str = "dense"
    compress: Method | None = None
    scope: Literal["layer", "global"] = "layer"
    local: LocalMethod | None = None

    @property
    def compression(self) -> Settings:
        """How gradients are averaged; uncompressed without a method."""
        return Settings(self.compress or NoCompression(), scope=self.scope)

    @property
    def narrow(self) -> NarrowMethod | None:
        """The narrower model that is trained; None for the task's own model."""
        return narrow_method(self.model)

    @property
    def low_rank(self) -> LowRankMethod | None:
        """How the model becomes low-rank; None if it does not."""
        return low_rank_method(self.model)

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch | None:
        """Build the `Switch` to low rank, or return None if the method has none.

        Args:
            keep: names or patterns of layers that stay dense under "pufferfish", if it has none of its own.
        """
        return self.low_rank.switch(recipe, keep) if self.low_rank else None


def training_method(text: str) -> TrainingMethod:
    """Parse `text`: a model, then local steps, then a compression method, each optional, joined by +.

    >>> training_method("bf16").compress, training_method("topk-0.01").compress, training_method("pufferfish").model
    (BFloat16(), TopK(k=0.01, sample=1.0), 'pufferfish')
    >>> training_method("early-bird-0.5+powersgd-4")
    TrainingMethod(name='early-bird-0.5+powersgd-4', model='early-bird-0.5', compress=PowerSGD(rank=4, start=0), scope='layer', local=None)
    >>> training_method("pufferfish+diloco-30+int4").local
    LocalMethod(h=30, fragments=1, delay=0, mixing=None, lr=0.7, momentum=0.9, compress=Int4(...))
    >>> training_method("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh (did you mean pufferfish?); choose from dense, pufferfish, ...
    """
    model, plus, exchange = text.strip().partition("+")
    name, bracket, options = model.partition("(")
    if name.lower() in MODELS:
        model = name.lower() + bracket + options
    if not (model in MODELS or low_rank_method(model) or is_pruning_method(model) or narrow_method(model)):
        model, exchange = "dense", text.strip()
    elif not exchange:
        if plus:
            raise ValueError(f"{text!r}: a compression method follows the +, such as {model}+powersgd-4")
        return TrainingMethod(text, model)
    if not is_local_method(exchange):
        return TrainingMethod(text, model, *_compression(exchange, text))
    if is_pruning_method(model):
        raise ValueError(f"method {text!r}: {model} cannot be combined with local steps")
    return TrainingMethod(text, model, local=local_method(exchange, lambda word: _method(word, text)))


def _compression(word: str, text: str) -> tuple[Method, Literal["layer", "global"]]:
    """Parse a compression method and its scope."""
    if not word.lower().startswith(_GLOBAL):
        return _method(word, text), "layer"
    method = _method(word[len(_GLOBAL) :], text)
    Settings(method, scope="global")  # raises an error for methods that do not support it
    return method, "global"


def _method(word: str, text: str) -> Method:
    """Parse a compression method; the error for an unknown name lists what may stand in its place."""
    if re.fullmatch(r"[\w.-]+", word) and short_form(word) is None:
        models = () if "+" in text else (*MODELS, "narrow", *PRUNING_METHODS)
        known = [*models, *LOCAL_METHODS, "bf16", "int8", "powersgd-4", "topk-0.01"]
        close = difflib.get_close_matches(word.lower(), known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"method {text!r}: there is no {word}{hint}; choose from {', '.join(known)} … (`pufferfish methods`)"
        )
    return parse_method(word)
