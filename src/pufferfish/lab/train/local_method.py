"""`LocalMethod`: local steps, parsed from text such as `diloco-30`, `streaming-30x4`, `sparseloco-30(lr=0.6)`, `diloco-30+int4`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from ...compression import Method, NoCompression, Settings, SparseLoCo
from ...local.fragments import Schedule
from ...local.local_steps import LocalSteps

#: An example of each name.
LOCAL_METHODS = ("diloco-30", "streaming-30x4", "sparseloco-30")
_FORM = re.compile(
    r"(?P<name>(?i:diloco|streaming|sparseloco))-(?P<h>\d+)(?:x(?P<k>\d+))?(?P<more>\([^()]*\))?"
)
_SETTINGS = ("fragments", "delay", "mixing", "lr", "momentum")


@dataclass(frozen=True, kw_only=True)
class LocalMethod:
    """Local steps between all workers, with SGD as the outer optimizer. See `LocalSteps`.

    Args:
        h: updates between two averages of a tensor.
        fragments: parts of the model that are averaged one after the other.
        delay: updates from sending a fragment to applying its average.
        mixing: share of its own parameters that a worker keeps; None: 0.5 with a delay, 0 without.
        lr: outer learning rate.
        momentum: outer Nesterov momentum; 0: none.
        compress: compression of the averages; None: they are sent in fp32.

    >>> LocalMethod(h=30, fragments=4, delay=7).as_code()
    'pf.LocalSteps(30, fragments=4, delay=7, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))'
    """

    h: int
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    lr: float = 0.7
    momentum: float = 0.9
    compress: Method | None = None

    def __post_init__(self) -> None:
        for name, limit in (("lr", math.inf), ("momentum", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
                raise ValueError(f"LocalSteps: outer {name}={value!r} must be at least 0 and below {limit}")
        if self.compress is not None and self.compress.has_momentum and self.momentum:
            name = type(self.compress).__name__
            raise ValueError(
                f"LocalSteps: {name} replaces outer momentum; pass momentum=0, as in diloco-{self.h}(momentum=0)+…"
            )
        assert self.schedule  # raises for invalid numbers

    @property
    def schedule(self) -> Schedule:
        """When which fragment is averaged."""
        mixing = (0.5 if self.delay else 0.0) if self.mixing is None else self.mixing
        return Schedule(h=self.h, fragments=self.fragments, delay=self.delay, mixing=mixing)

    @property
    def settings(self) -> Settings:
        """Settings of the compression."""
        return Settings(self.compress or NoCompression())

    def outer(self, params: list[nn.Parameter]) -> optim.Optimizer:
        """Create the outer optimizer."""
        return optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)

    def build(self) -> LocalSteps:
        """Create the local steps of this worker. Call it on all workers."""
        return LocalSteps(
            self.h, outer=self.outer, method=self.compress, fragments=self.fragments, delay=self.delay,
            mixing=self.mixing,
        )  # fmt: skip

    def as_code(self) -> str:
        """The local steps as Python code."""
        given = [
            f"{name}={x}"
            for name in ("fragments", "delay")
            if (x := getattr(self, name)) > (name == "fragments")
        ]
        given += [] if self.mixing is None else [f"mixing={self.mixing}"]
        given += [] if self.compress is None else [f"method=pf.compression.{self.compress!r}"]
        momentum = f", momentum={self.momentum}, nesterov=True" if self.momentum else ""
        return f"pf.LocalSteps({', '.join([str(self.h), *given])}, outer=lambda p: torch.optim.SGD(p, lr={self.lr}{momentum}))"


def is_local_method(text: str) -> bool:
    """Whether text is the name of local steps, maybe followed by + and compression.

    >>> [is_local_method(text) for text in ("diloco-30", "streaming-30x4+int4", "sparseloco", "powersgd-4")]
    [True, True, False, False]
    """
    found = _FORM.match(text)
    return found is not None and text[found.end() :][:1] in ("", "+")


def local_method(text: str, compression: Callable[[str], Method]) -> LocalMethod:
    """Parse local steps: `diloco-H`, `streaming-HxK`, `sparseloco-H`, settings in brackets, compression after a +.

    Args:
        compression: parses a compression method.

    >>> from pufferfish.compression.parse_method import parse_method
    >>> local_method("streaming-30x4(lr=0.5)+Int4", parse_method)
    LocalMethod(h=30, fragments=4, delay=7, mixing=None, lr=0.5, momentum=0.9, compress=Int4(...))
    """
    found = _FORM.match(text)
    assert found is not None
    name, h, rest = found["name"].lower(), int(found["h"]), text[found.end() :]
    example = next(each for each in LOCAL_METHODS if each.startswith(name))
    if (found["k"] is not None) != (name == "streaming"):
        raise ValueError(f"method {text!r}: write it like {example}, {_meaning(name)}")
    settings: dict[str, Any] = {"h": h}
    if name == "streaming":
        k = int(found["k"])
        settings |= {"fragments": k, "delay": max(min(h // k, h - 1), 0) if k else 0}
    elif name == "sparseloco":
        settings |= {"lr": 1.0, "momentum": 0.0, "compress": SparseLoCo()}
    settings |= _settings(found["more"] or "()", text)
    if rest:
        if name == "sparseloco" or rest == "+":
            raise ValueError(
                f"method {text!r}: after diloco or streaming, a compression method follows the +"
            )
        settings["compress"] = compression(rest[1:])
    try:
        return LocalMethod(**settings)
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None


def _meaning(name: str) -> str:
    return "updates × fragments" if name == "streaming" else "with the number of updates between two averages"


def _settings(brackets: str, text: str) -> dict[str, Any]:
    """Parse `(lr=0.5, delay=3)`."""
    try:
        call = ast.parse(f"f{brackets}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        values = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        values = {brackets: None}
    unknown = values.keys() - {*_SETTINGS}
    if unknown:
        raise ValueError(f"method {text!r}: the brackets take {', '.join(_SETTINGS)}, as in (lr=0.5)")
    return values
