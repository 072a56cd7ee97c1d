"""`FileTask`: the model and the data of a user's file as a task."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import BatchOrder, Device, Rows
from .recipe import Recipe
from .task import Batch, Task, eval_mode
from .user_file import UserFile

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
