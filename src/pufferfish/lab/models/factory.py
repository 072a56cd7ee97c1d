"""Functions of the user's, named on a command line: what goes wrong in them is told in one line that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compression.parse_method import module_at
from . import REFERENCES

LOSS = "loss_fn(model, batch)"


def load_factory(spec: str) -> Callable[[], Any]:
    """The function behind `file.py:function` or `package.module:function`."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ValueError(
            f"{spec!r} is neither a built-in model ({', '.join(REFERENCES)}) nor file.py:function "
            "nor package.module:function"
        )
    factory = getattr(module_at(place), name, None)
    if not callable(factory):
        raise ValueError(f"{place} has no function {name!r}")
    return lambda: called(spec, "building the model", factory)


def called(spec: str, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns.

    >>> called("nets.py:small", "loss_fn(model, batch)", {}.__getitem__, "label")
    Traceback (most recent call last):
    ValueError: nets.py:small: loss_fn(model, batch) raised KeyError: 'label'
    """
    try:
        return function(*args)
    except Exception as error:  # theirs may fail in any way
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{spec}: {what} raised {type(error).__name__}: {first}") from error
