"""`UserFile`: a user's file with `build()` and `data()`, for all commands. Errors in its code name the file and the line."""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Rows

_DATA = "`def data(): return (inputs, targets), (inputs, targets)`, for training and validation"
_ROW = "return tensors (inputs, targets), or a Dataset whose rows are (input, target)"
#: Rows of `data()` that stand for an example.
_EXAMPLE_ROWS = 64


class UserFile:
    """The functions of a file: `build()` returns the model; the others are optional.

    | function | returns |
    |---|---|
    | `build()` or `build(width=1.0)` | the model; `width` scales the sizes of its hidden layers |
    | `data()` | training and validation data, and test data if there is any: each a tuple of tensors `(inputs, targets)` or a `Dataset` of such rows |
    | `loss(output, target)` | the mean loss of a batch; cross-entropy by default |
    | `score(output, target)` | the mean quality of a batch, higher is better; the accuracy, or the loss if the file has one, by default |
    | `example()` | one worker's batch `(inputs, targets)`; the first rows of `data()` by default |

    Rows may have several inputs: all but the last are arguments of the model.

    Args:
        text: `file.py`, or `file.py:function` or `package.module:function` with another function than `build`.

    >>> UserFile("pufferfish.lab.models:resnet18").build().fc
    Linear(in_features=512, out_features=10, bias=True)
    """

    def __init__(self, text: str) -> None:
        place, _, name = (text, "", "build") if text.endswith(".py") else text.rpartition(":")
        if not place:
            raise ValueError(f"{text!r} is not file.py, file.py:function or package.module:function")
        self.module = import_path(place)
        self.path = Path(self.module.__file__ or place)
        self.name = self.path.name + (f":{name}" if name != "build" else "")
        self.source = self.path.read_text(encoding="utf-8") if self.path.suffix == ".py" else ""
        self._build = self.function(name)
        if self._build is None:
            raise ValueError(f"{place} has no function {name!r}; add `def {name}(): return model`")

    def __repr__(self) -> str:
        """The name, with a checksum of the text: it is the same on all machines, and changes with the file."""
        return f"{self.name}@{hashlib.sha256(self.source.encode()).hexdigest()[:12]}"

    def function(self, name: str) -> Callable[..., Any] | None:
        """The function of this name; None if the file has none."""
        found = getattr(self.module, name, None)
        return found if callable(found) else None

    @property
    def builder(self) -> Callable[..., Any]:
        """The function that builds the model."""
        assert self._build is not None
        return self._build

    def build(self, **options: Any) -> nn.Module:
        """Build the model."""
        model = self.call("building the model", self.builder, **options)
        if not isinstance(model, nn.Module):
            hint = "; return the model alone, and a batch from example()" if isinstance(model, tuple) else ""
            raise ValueError(f"{self.name}: build() must return a model, got {type(model).__name__}{hint}")
        return model

    def data(self) -> dict[str, Rows]:
        """The rows of "train", "valid" and, if there are any, "test". torch's random seed is 0 in `data`."""
        if self.function("data") is None:
            raise ValueError(f"{self.name} has no function 'data'; add {_DATA}")
        splits = self._seeded("data")
        if not isinstance(splits, tuple | list) or len(splits) not in (2, 3):
            got = f"{len(splits)} items" if isinstance(splits, tuple | list) else type(splits).__name__
            raise ValueError(f"{self.name}: data() returned {got}; return train, valid or train, valid, test")
        found = {}
        for split, rows in zip(("train", "valid", "test"), splits, strict=False):
            try:
                found[split] = Rows(rows)
            except ValueError as error:
                raise ValueError(f"{self.name}: data(), {split}: {error}; {_ROW}") from None
            if not len(found[split]):
                raise ValueError(f"{self.name}: data(), {split}: there are no rows; return at least one")
        return found

    def example(self) -> tuple[Tensor, ...] | None:
        """One worker's batch, by `example` or else the first rows of `data`; None if the file has neither."""
        if self.function("example") is not None:
            batch = self._seeded("example")
            if isinstance(batch, tuple | list) and len(batch) > 1 and all(map(torch.is_tensor, batch)):
                return tuple(batch)
            raise ValueError(f"{self.name}: example() must return a tuple of tensors (inputs, targets)")
        if self.function("data") is None:
            return None
        rows = self.data()["train"]
        return self.batch(rows, torch.arange(min(_EXAMPLE_ROWS, len(rows))))

    def batch(self, rows: Rows, numbers: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Rows of `data`; errors name the file."""
        try:
            batch = self.call("reading rows of data()", rows.batch, numbers, device)
        except ValueError as error:
            raise ValueError(f"{error}; {_ROW}") from error
        if len(batch) < 2:
            raise ValueError(f"{self.name}: rows of data() have no target; {_ROW}")
        return batch  # type: ignore[no-any-return]

    def call(self, action: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return `function(*args)`; an exception becomes a ValueError that names the file, the line and `action`."""
        try:
            return function(*args, **options)
        except Exception as error:  # user code may raise anything
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if Path(frame.filename) == self.path]
            where = f"{self.name}, line {lines[-1]}" if lines else self.name
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(f"{where}: {action} raised {type(error).__name__}: {first_line}") from error

    def _seeded(self, name: str) -> Any:
        """The result of a function without arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random split on all workers, and after a restart
            return self.call(f"{name}()", getattr(self.module, name))


def import_path(place: str) -> ModuleType:
    """Import `file.py` or `package.module`, once. The file's folder, or the current one, is added to `sys.path`."""
    path = Path(place).resolve()
    if place.endswith(".py") and not path.is_file():
        raise ValueError(f"{place}: there is no such file")
    folder = str(path.parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import its neighbours
    try:
        return _file(path) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _file(path: Path) -> ModuleType:
    name = str(path)  # no other module can have it; dataclasses look their module up by name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
