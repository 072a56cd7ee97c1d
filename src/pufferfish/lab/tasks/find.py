"""Tasks by name: `cifar10`, `cifar10:vgg19`, `text:d=128,layers=2`, `file.py:task`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from importlib import import_module
from typing import Any

from ...compression.parse_method import module_at
from .task import Task

#: Name, the module it is in, and its class there: loaded when it is asked for.
TASKS = {
    "digits": ("digits", "Digits"),
    "cifar10": ("cifar10", "Cifar10"),
    "wikitext2": ("wikitext2", "Wikitext2"),
    "wikitext2:lstm": ("wikitext2", "Wikitext2"),
    "wikitext2:gpt": ("wikitext2", "Wikitext2GPT"),
    "multi30k": ("multi30k", "Multi30k"),
    "imagefolder": ("imagefolder", "ImageFolder"),
    "text": ("text", "Text"),
}


def find(text: str) -> Task:
    """The task that is meant by `text`: a built-in one, perhaps with settings, or one from a file or module.

    >>> find("cifar10:vgg19")
    Cifar10(model='vgg19', held=1000)
    >>> find("digits:mlp,width=16")
    Digits(model='mlp', width=16, held=144)
    >>> find("cifar")
    Traceback (most recent call last):
    ValueError: task 'cifar': there is no such task (did you mean cifar10?); there are digits, ... and file.py:task
    """
    name, colon, rest = text.partition(":")
    try:
        if name in TASKS:
            return _built_in(name, rest)
        if colon:
            return _from_module(*text.rsplit(":", 1))
    except (ValueError, TypeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"task {text!r}: {error}") from None
    close = difflib.get_close_matches(text, TASKS, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"task {text!r}: there is no such task{hint}; there are {', '.join(TASKS)} and file.py:task"
    )


def _built_in(name: str, rest: str) -> Task:
    parts = rest.split(",") if rest else []
    if parts and f"{name}:{parts[0]}" in TASKS:
        name = f"{name}:{parts.pop(0)}"
    module, kind = TASKS[name]
    task: Any = getattr(import_module(f".{module}", __package__), kind)
    fields = {f.name: f.default for f in dataclasses.fields(task)}
    settings: dict[str, Any] = {}
    for i, part in enumerate(parts):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            if i or "model" not in fields:
                raise ValueError(
                    f"{part!r} is no setting; write {', '.join(f'{k}={v!r}' for k, v in fields.items())}"
                )
            key, value = "model", key
        if key not in fields:
            raise ValueError(f"there is no setting {key!r}; there are {', '.join(fields)}")
        settings[key] = _as(type(fields[key]), key, value)
    made: Task = task(**settings)
    return made


def _as(kind: type, key: str, value: str) -> Any:
    """`value` as the setting's default is: a text stays one, a number is read."""
    if kind is str:
        return value
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        read = None
    if type(read) not in (kind, int):
        raise ValueError(f"{key}={value}: it is {'an int' if kind is int else f'a {kind.__name__}'}")
    if read < 0 or (read == 0 and key not in ("held", "dropout")):
        raise ValueError(f"{key}={value}: too small")
    return kind(read)


def _from_module(place: str, name: str) -> Task:
    found: Any = getattr(module_at(place), name, None)
    if found is None:
        raise ValueError(f"{place} has no {name!r}")
    if not isinstance(found, Task) and callable(found):
        found = found()
    if not isinstance(found, Task):
        raise TypeError(f"{name} is no Task, nor does it make one; derive it from pufferfish.lab.tasks.Task")
    return found
