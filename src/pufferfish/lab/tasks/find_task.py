"""`find_task`: tasks by name, such as `cifar10:vgg19`, `text:d=128,layers=2` or `file.py`."""

import ast
import dataclasses
import difflib
from importlib import import_module
from typing import Any

from .file_task import FileTask
from .task import Task
from .user_file import UserFile, import_path

#: Module and class of each task, imported on demand.
TASKS = {
    "digits": ("digits", "Digits"),
    "cifar10": ("cifar10", "Cifar10"),
    "wikitext2": ("wikitext2", "Wikitext2"),
    "wikitext2:lstm": ("wikitext2", "Wikitext2"),
    "wikitext2:gpt": ("wikitext2", "Wikitext2GPT"),
    "wikitext2:llama": ("wikitext2", "Wikitext2GPT"),
    "multi30k": ("multi30k", "Multi30k"),
    "imagefolder": ("imagefolder", "ImageFolder"),
    "enwik8": ("enwik8", "Enwik8"),
    "text": ("text", "Text"),
}


def find_task(text: str) -> Task:
    """Create the task named by `text`: a built-in one with options, or the user's file of a model and its data.

    >>> find_task("cifar10:vgg19")
    Cifar10(model='vgg19', held=1000, cutout=0)
    >>> find_task("digits:mlp,width=16")
    Digits(model='mlp', width=16, held=144)
    >>> find_task("wikitext2:llama,layers=2").model
    'llama'
    >>> find_task("cifar")
    Traceback (most recent call last):
    ValueError: task 'cifar': not found (did you mean cifar10?); choose from digits, ... or file.py
    """
    name, colon, rest = text.partition(":")
    try:
        if name in TASKS:
            return _built_in(name, rest)
    except ValueError as error:
        raise ValueError(f"task {text!r}: {error}") from None
    if colon or text.endswith(".py"):
        return _from_file(text)
    close = difflib.get_close_matches(text, TASKS, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"task {text!r}: not found{hint}; choose from {', '.join(TASKS)} or file.py")


def _built_in(name: str, rest: str) -> Task:
    parts = rest.split(",") if rest else []
    if parts and f"{name}:{parts[0]}" in TASKS:
        name = f"{name}:{parts[0]}"
    module, class_name = TASKS[name]
    task_class: Any = getattr(import_module(f".{module}", __package__), class_name)
    defaults = {f.name: f.default for f in dataclasses.fields(task_class)}
    if ":" in name and "model" not in defaults:
        parts.pop(0)  # the class stands for this model
    options: dict[str, Any] = {}
    for i, part in enumerate(parts):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            if i or "model" not in defaults:
                raise ValueError(
                    f"{part!r} is not an option; write {', '.join(f'{k}={v!r}' for k, v in defaults.items())}"
                )
            key, value = "model", key
        if key not in defaults:
            raise ValueError(f"unknown option {key!r}; choose from {', '.join(defaults)}")
        options[key] = _parse_option(type(defaults[key]), key, value)
    task: Task = task_class(**options)
    return task


def _parse_option(kind: type, key: str, value: str) -> Any:
    """Convert `value` to the type of the option's default."""
    if kind is str:
        return value
    try:
        number = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        number = None
    if type(number) not in (kind, int):
        raise ValueError(f"{key}={value} must be {'an int' if kind is int else f'a {kind.__name__}'}")
    if number < 0 or (number == 0 and key not in ("held", "dropout", "epoch_tokens")):
        raise ValueError(f"{key}={value} is too small")
    return kind(number)


def _from_file(text: str) -> Task:
    """The task of a file with `build` and `data`; `file.py:name` may also name a `Task` or its class."""
    place, _, name = text.rpartition(":")
    found: Any = getattr(import_path(place), name, None) if place and not text.endswith(".py") else None
    if isinstance(found, type) and issubclass(found, Task):
        found = found()
    return found if isinstance(found, Task) else FileTask(UserFile(text))
