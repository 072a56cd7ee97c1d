"""`find_task`: tasks by name, a built-in one such as `cifar10:vgg19`, or the functions of a user's `file.py`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import BatchOrder, Device, Rows
from ..data.dataset import DATA_VARIABLE
from .task import Batch, Recipe, Task, eval_mode

#: Module and class of each task, imported on demand.
TASKS = {
    "digits": ("digits", "Digits"),
    "cifar10": ("cifar10", "Cifar10"),
    "wikitext2": ("language", "Wikitext2"),
    "wikitext2:lstm": ("language", "Wikitext2"),
    "wikitext2:gpt": ("language", "Wikitext2GPT"),
    "wikitext2:llama": ("language", "Wikitext2GPT"),
    "multi30k": ("multi30k", "Multi30k"),
    "imagefolder": ("images", "ImageFolder"),
    "enwik8": ("language", "Enwik8"),
    "text": ("language", "Text"),
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


#: Rows on which the functions of a file are tried before a run starts.
_TRIED_ROWS = 2
_DEFAULT_LOSS = (
    "the default is cross-entropy of (rows, classes) and (rows); add `def loss(output, target): return ...`"
)


class FileTask(Task):
    """A task from the functions of a `UserFile`.

    The name of the file and a checksum of its text identify the task: a run is resumed after a restart, but not after an
    edit of the file.
    """

    recipes: ClassVar[Mapping[str, Recipe]] = {
        "short": Recipe(
            epochs=12, batch=64, lr=1e-3, optimizer="adamw", warm_up=0.1, weight_decay=0.01, switch_at=4,
        )
    }  # fmt: skip

    def __init__(self, file: UserFile) -> None:
        self.file, self.name = file, file.name
        self._loss, self._score = file.function("loss"), file.function("score")
        self.metric = "score" if self._score else "loss" if self._loss else "accuracy"
        self.higher_is_better = self.metric != "loss"
        self._data: dict[str, Rows] | None = None

    def __repr__(self) -> str:
        return repr(self.file)

    @property
    def source(self) -> tuple[str, str]:
        return self.file.path.name, self.file.source

    @property
    def builder(self) -> Callable[..., nn.Module]:
        return self.file.builder

    def build(self, **options: Any) -> nn.Module:
        return self.file.build(**options)

    def load(self, folder: Path | None) -> dict[str, Rows]:
        if folder is not None:
            raise ValueError(f"--data {folder}: {self.name} reads its own data, in data(); remove --data")
        if self._data is None:
            splits = self.file.data()
            self.final_data = "test" if "test" in splits else "validation"
            self._data = {"test": splits["valid"]} | splits
        return self._data

    def steps(self, data: dict[str, Rows], batch: int) -> int:
        n = len(data["train"])
        if n < batch:
            raise ValueError(
                f"{self.name}: data() has {n:,} training rows, fewer than a batch of {batch:,}; return more rows, or "
                "lower --batch"
            )
        return n // batch

    def epoch(self, data: Any, order: BatchOrder) -> Iterator[Batch]:
        rows: Rows = data[order.split]
        for batch in order.batches(len(rows), device=None if rows.in_memory else "cpu"):
            yield rows.batch(order.shard(batch), order.device)

    def loss(self, model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
        *inputs, target = batch
        return self._mean_loss(model(*inputs), target, recipe.label_smoothing)

    def evaluate(
        self, model: nn.Module, data: Any, split: str, *, device: Device = "cpu", batch: int = 256
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        with eval_mode(model) as module:
            for *inputs, target in self.batches(data, split, batch, device=device):
                for name, value in self._figures(module(*inputs), target).items():
                    totals[name] = totals.get(name, 0.0) + float(value) * len(target)
        return {name: total / len(data[split]) for name, total in totals.items()}

    def check(self, model: nn.Module, data: Any, device: Device) -> None:
        for split in ("train", "valid", "test"):
            rows: Rows = data[split]
            self.check_batch(model, self.file.batch(rows, torch.arange(min(_TRIED_ROWS, len(rows))), device))

    def example(self, model: nn.Module, device: Device) -> Batch:
        """One worker's batch, by the file's `example`, tried on the model."""
        batch = self.file.example()
        assert batch is not None
        batch = tuple(x.to(device) for x in batch)
        self.check_batch(model, batch)
        return batch

    def check_batch(self, model: nn.Module, batch: Batch) -> None:
        """Raise ValueError if the model or a function of the file fails on a batch."""
        *inputs, target = batch
        shapes = ", ".join(map(_shape, inputs))
        with eval_mode(model) as module, torch.enable_grad():
            output = self.file.call(f"the model on inputs of shape {shapes}", module, *inputs)
            if self._loss is None and target.is_floating_point():
                raise ValueError(
                    f"{self.name}: targets are {target.dtype}, but the default loss, cross-entropy, needs classes; add "
                    "`def loss(output, target): return ...`"
                )
            call = f"(output, target) on {_shape(output)} and {_shape(target)}"
            try:
                loss = self.file.call(f"loss{call}", self._mean_loss, output, target)
            except ValueError as error:
                hint = "" if self._loss else f"; {_DEFAULT_LOSS}"
                raise ValueError(f"{error}{hint}") from error
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                got = f"a tensor of shape {_shape(loss)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"{self.name}: loss(output, target) returned {got}; return a scalar tensor that requires grad"
                )
            with torch.no_grad():
                self.file.call(
                    f"{self.metric}{call}", lambda: float(self._figures(output, target)[self.metric])
                )

    def _mean_loss(self, output: Any, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        if self._loss is not None:
            return self._loss(output, target)  # type: ignore[no-any-return]
        return F.cross_entropy(output, target.long(), label_smoothing=label_smoothing)

    def _figures(self, output: Any, target: Tensor) -> dict[str, Any]:
        """Loss and metric of a batch."""
        figures = {"loss": self._mean_loss(output, target)}
        if self._score is not None:
            figures["score"] = self._score(output, target)
        elif self._loss is None:
            figures["accuracy"] = 100 * (output.argmax(1) == target).float().mean()
        return figures


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


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


def with_tokenizer(task: str, data: Path | None) -> str:
    """Add the tokenizer.json beside the text to the name of a `text` task that does not name a tokenizer.

    >>> with_tokenizer("text:d=64,tokenizer=bytes", Path("book"))
    'text:d=64,tokenizer=bytes'
    """
    name, _, options = task.partition(":")
    place = data or os.environ.get(DATA_VARIABLE)
    if name != "text" or "tokenizer=" in options or not place:
        return task
    path = (Path(place) if Path(place).is_dir() else Path(place).parent) / "tokenizer.json"
    if not path.is_file():
        return task
    if "," in str(path):
        raise ValueError(f"{path}: options of a task are separated by commas; move it to a path without one")
    return f"{task}{',' if options else ':'}tokenizer={path}"
