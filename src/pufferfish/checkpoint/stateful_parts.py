"""Parts of a job with `state_dict` and `load_state_dict`, such as a scheduler: their states, checked before they are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Parts = Mapping[str, Any]  # by name; None: there is none


def check_is_stateful(parts: Parts) -> None:
    """Raise TypeError if a part lacks `state_dict` or `load_state_dict`."""
    for name, x in parts.items():
        if x is not None and not (hasattr(x, "state_dict") and hasattr(x, "load_state_dict")):
            raise TypeError(f"{name} is a {type(x).__name__} without state_dict and load_state_dict")


def state_dicts(parts: Parts) -> dict[str, Any]:
    """Return the state of each part."""
    return {name: None if x is None else x.state_dict() for name, x in parts.items()}


def class_name(x: Any) -> str:
    """Return the class of a part; for a scheduler of schedulers with theirs.

    >>> from torch import nn, optim
    >>> optimizer = optim.SGD(nn.Linear(1, 1).parameters())
    >>> class_name(optim.lr_scheduler.ChainedScheduler([optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]))
    'ChainedScheduler(ExponentialLR)'
    """
    inner = [class_name(scheduler) for scheduler in getattr(x, "_schedulers", ())]
    return type(x).__name__ + (f"({', '.join(inner)})" if inner else "")


def check_parts(path: Path, parts: Parts, states: Mapping[str, Any], classes: Mapping[str, str]) -> None:
    """Raise ValueError if a part cannot load its saved state, as far as that is known without loading it.

    Args:
        path: the checkpoint, for the message.
        classes: `class_name` of the parts that were saved, where it is known.
    """
    for name, x in _with_state(parts, states).items():
        now = class_name(x)
        if classes.get(name, now) != now:
            raise ValueError(
                f"{path}: {name} was saved as {classes[name]}, but is {now}; pass the same class"
            )
        if hasattr(x, "check_state_dict"):
            try:
                x.check_state_dict(states[name])
            except ValueError as error:
                raise ValueError(f"{path}: {name}: {error}") from None


def load_parts(path: Path, parts: Parts, states: Mapping[str, Any]) -> None:
    """Load the saved state of each part that has one; ValueError names a part that fails."""
    for name, x in _with_state(parts, states).items():
        try:
            x.load_state_dict(states[name])
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            message = f"{path}: {name}: {type(error).__name__}: {error}"
            raise ValueError(f"{message}; pass the {name} that was saved") from error


def _with_state(parts: Parts, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that have a saved state."""
    return {name: x for name, x in parts.items() if x is not None and states.get(name) is not None}
