"""`load_factory`: a user's function named on the command line. Its errors become one line that names it."""

from collections.abc import Callable
from typing import Any

from ...compression.parse_method import import_path
from . import REFERENCES

LOSS_CALL = "loss_fn(model, batch)"


def load_factory(spec: str) -> Callable[[], Any]:
    """Load the function named by `file.py:function` or `package.module:function`."""
    module, _, name = spec.rpartition(":")
    if not module:
        raise ValueError(
            f"{spec!r} is not a built-in model ({', '.join(REFERENCES)}), file.py:function or package.module:function"
        )
    factory = getattr(import_path(module), name, None)
    if not callable(factory):
        raise ValueError(f"{module} has no function {name!r}")
    return lambda: call_user_code(spec, "building the model", factory)


def call_user_code(spec: str, action: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; an exception becomes a ValueError that names `spec` and `action`.

    >>> call_user_code("nets.py:small", "loss_fn(model, batch)", {}.__getitem__, "label")
    Traceback (most recent call last):
    ValueError: nets.py:small: loss_fn(model, batch) raised KeyError: 'label'
    """
    try:
        return function(*args)
    except Exception as error:  # user code may raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{spec}: {action} raised {type(error).__name__}: {first_line}") from error
