"""`Choice`: how to train, in a word: `dense`, `bf16`, `powersgd-4`, `pufferfish`, `auto+powersgd-4`, `file.py:Mine(rank=2)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compression import Method
from ...compression.parse_method import known, method_from
from ...switching.moments import AtEpoch
from ...switching.switch import Switch
from ..rivals.rival_by_name import RIVALS, is_rival
from ..tasks.task import Recipe

#: The model: as it is, low-rank by the paper's recipe, low-rank by what the weights say.
MODELS = ("dense", "pufferfish", "auto")
_SHORT = {"bf16": "BFloat16", "fp16": "Float16", "int8": "BlockInt8", "fp8": "BlockFP8"}


@dataclass(frozen=True)
class Choice:
    """What becomes of the model, and of its gradients on their way.

    Args:
        name: as it was written.
        model: "dense", "pufferfish", "auto", or a rival such as "early-bird-0.5".
        compress: None sends gradients as plain DDP does.

    >>> choice("auto+powersgd-4")
    Choice(name='auto+powersgd-4', model='auto', compress=PowerSGD(rank=4))
    """

    name: str
    model: str = "dense"
    compress: Method | None = None

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch | None:
        """When and how the model becomes low-rank."""
        if self.model not in ("pufferfish", "auto"):
            return None
        settings: dict[str, Any] = {"lr": recipe.switch_lr} if recipe.switch_lr != 1 else {}
        if self.model == "auto":
            return Switch(**settings)
        at = recipe.epochs // 3 if recipe.switch_at is None else recipe.switch_at
        return Switch(rank=recipe.rank, keep=keep, when=AtEpoch(min(at, recipe.epochs - 1)), **settings)


def choice(text: str) -> Choice:
    """Read `text`: a model, a compression method, or both with a + between them.

    >>> choice("bf16").compress, choice("topk-0.01").compress, choice("pufferfish").model
    (BFloat16(), TopK(k=0.01, sample=1.0), 'pufferfish')
    >>> choice("early-bird-0.5+powersgd-4")
    Choice(name='early-bird-0.5+powersgd-4', model='early-bird-0.5', compress=PowerSGD(rank=4))
    >>> choice("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh; there are dense, pufferfish, auto, ...
    """
    first, plus, rest = text.strip().partition("+")
    if first in MODELS or is_rival(first):
        if plus and not rest:
            raise ValueError(f"{text!r}: a compression method follows the +, such as {first}+powersgd-4")
        return Choice(text, first, _method(rest, text) if rest else None)
    return Choice(text, compress=_method(text.strip(), text))


def _method(word: str, text: str) -> Method:
    """A method by its name, also in small letters with its first setting after a hyphen."""
    short = re.fullmatch(r"([a-z][a-z0-9]*)(?:-([\d.]+))?", word)
    if short is None:
        return method_from(word)
    names = {name.lower(): name for name in known()} | _SHORT
    if short[1] not in names:
        there = ", ".join([*MODELS, *RIVALS, *_SHORT, "powersgd-4", "topk-0.01"])
        raise ValueError(
            f"method {text!r}: there is no {short[1]}; there are {there} … (`pufferfish methods`)"
        )
    return method_from(names[short[1]] + (f"({short[2]})" if short[2] else ""))
