"""`Rows`: a flat shard of FSDP2 as the tensors that the engine averages: this worker's rows of each parameter, or one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.names import join_name
from .batch import make_batches
from .engine import Engine
from .fsdp2_modules import group_of
from .method import Method
from .settings import Settings


class _Place(NamedTuple):
    """One tensor in a flat shard."""

    begin: int
    shape: tuple[int, ...] | None  # None: the whole shard
    parameters: list[Any]  # FSDP's, whose gradients it holds


class Rows:
    """Tensors that the engine averages for one sharded module, as views of its flat shard.

    A method for matrices gets this worker's part of each trainable parameter, in its shape: some of the rows, where the
    first dimension is sharded. FSDP pads each part to the same number of rows on all workers; the padding is left out. A
    worker that has no rows takes part with one zero of its padding. Other methods get the shard as one vector.

    Args:
        name: Name of the module.
        module: A module that `fully_shard` was applied to.
        settings: Settings of the module, with one method.
        paths: Names of all modules of the model, by id.
        shard: This worker's shard and the number of shards.
    """

    def __init__(
        self, name: str, module: Any, settings: Settings, paths: Mapping[int, str], shard: tuple[int, int]
    ) -> None:
        self.settings = settings
        #: Whether the method is one for matrices.
        self.matrix = any(method.matrix for method in settings.by_pattern.values())
        #: Elements of the flat shard if all parameters are used, padding included.
        self.numel = 0
        place = "[{}/{}]".format(*shard)  # part of the names: every shard draws its own random numbers
        rows: dict[str, _Place] = {}
        self._padded: dict[str, tuple[int, ...]] = {}
        trainable = [p for p in group_of(module).fsdp_params if p.sharded_param.requires_grad]
        for p in trainable:
            key = join_name(paths[id(p._module_info.module)], p._module_info.param_name) + place
            if p.sharded_size.numel():
                rows[key] = _Place(self.numel, p.sharded_size, [p])
            self._padded[key] = p.padded_sharded_param_size
            self.numel += p.padded_sharded_param_size.numel()
        whole = {name + place: _Place(0, (1,) if self.matrix else None, trainable)}
        self._places = rows if self.matrix and rows else whole

    @property
    def compressed(self) -> set[Method]:
        """Methods that compress some of the tensors, on the worker that has the most rows."""
        if not self.matrix:
            return set(self.settings.by_pattern.values())
        like = {name: torch.empty(shape, device="meta") for name, shape in self._padded.items()}
        return {batch.policy for batch in make_batches(self.settings, like)}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name."""
        return {
            name: flat if shape is None else flat[begin : begin + torch.Size(shape).numel()].view(shape)
            for name, (begin, shape, _) in self._places.items()
        }

    def units(self, rates: Sequence[tuple[float, set[int]]], scale: float) -> dict[str, float]:
        """Loss scale over learning rate of each tensor; 0 where its parameters have several rates.

        Args:
            rates: Learning rates, each with the ids of its parameters; others have the rate 1.
            scale: The loss scale.
        """
        units = {}
        for name, place in self._places.items():
            mine = {id(p.sharded_param) for p in place.parameters}
            known = {rate for rate, ids in rates if ids & mine} or {1.0}
            rate = known.pop() if len(known) == 1 else 0.0
            units[name] = scale / rate if rate else 0.0
        return units


def move_engine(engine: Engine, before: Rows, after: Rows) -> Engine:
    """Return an engine for other views of the same flat shard, with the position and error feedback of `engine`."""
    moved = Engine(after.settings, engine.transport)
    moved.state.steps, moved.state.scale = engine.state.steps, engine.state.scale
    errors = engine.state.errors()
    if errors:
        flat = next(iter(errors.values())).new_zeros(after.numel)
        for name, view in before.views(flat).items():
            if name in errors and errors[name].shape == view.shape:  # not if parameters were unused
                view.copy_(errors[name])
        known = set(engine.state.units.values())
        views = after.views(flat)
        moved.state.start_with(views, dict.fromkeys(views, known.pop() if len(known) == 1 else 0.0))
        moved.arrange(views)
    return moved
