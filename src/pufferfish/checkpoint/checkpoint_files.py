"""The files of one checkpoint: written by every rank, read and compared with what is there to receive them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from ..layers.names import own_keys, own_name
from ..optim.by_name import check_optimizer, group_names, names_of
from ..planning.plan import Plan
from . import checkpoint_folder as folders
from .packing import Shards, pack, storable, unpack
from .sharded_tensors import Pieces, own_pieces, placed
from .structure import Ranks


def write(folder: Path, rank: int, states: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's files: its `own` state and shards; on rank 0 also the `states` of the whole job.

    Returns:
        By what to know each file again.
    """
    tree, tensors = pack(dict(own), _own(rank))
    offsets: dict[str, list[int]] = {}
    files = []
    _refuse_shards(_own(rank), tensors)
    for name, state in states.items():
        shared, found = pack(state, name)
        if name == "training":
            _refuse_shards(name, found)
        pieces, where = own_pieces({f"{name}:{key}": x for key, x in found.items()})
        tensors |= pieces
        offsets |= where
        if rank == 0:
            whole = {key: x for key, x in found.items() if not isinstance(x, DTensor)}
            files += _put(folder / name, shared, whole)
    files += _put(folder / _own(rank), tree, tensors, {"offsets": json.dumps(offsets)})
    return {file.name: folders.record(file) for file in files}


class Saved:
    """A checkpoint, as rank `rank` of `size` reads it for `model`."""

    def __init__(
        self, path: Path, model: nn.Module | None = None, *, digest: str = "", rank: int = 0, size: int = 1
    ) -> None:
        manifest = folders.check(path, contents=False)
        if digest and manifest["sha256"] != digest:
            raise ValueError(f"{path}: not the checkpoint that rank 0 sees; all ranks must share the folder")
        self.path = path
        self._device = next((p.device for p in model.parameters()), None) if model else None
        self.world: int = manifest["world"]
        self.training: dict[str, Any] = self._get("training")
        self.ranks: Ranks = self.training["ranks"]
        text = self.training["plan"]
        self.plan = None if text is None else Plan.from_json(text)
        self.own: dict[str, Any] | None = self._get(_own(rank), self._device) if size == self.world else None
        order = sorted(range(self.world), key=lambda r: r != rank)  # our own file first
        self._pieces = Pieces([path / f"{_own(r)}.safetensors" for r in order])

    def common(self) -> dict[str, Any]:
        """What a compressor of another number of ranks can go on with: what the first one kept, and it knows what of
        that was shared."""
        return {"compressor": self._get(_own(0), self._device)["parts"]["compressor"]}

    def weights(self, file: str, model: nn.Module) -> dict[str, Any]:
        """A model's tensors by own name, laid out as `model`'s are, if all of them fit."""
        there, here = self._get(file), own_state(model)
        for name in [*here, *there]:
            if name not in there:
                raise ValueError(f"{self.path}: it lacks {name}, which the model has")
            if name not in here:
                raise ValueError(f"{self.path}: it has {name}, which the model does not")
            a, b = _form(there[name]), _form(here[name])
            if a != b:
                raise ValueError(f"{self.path}: {name} is {a} there and {b} in the model")
        return {name: placed(value, here[name], self._pieces, f"{file}:") for name, value in there.items()}

    def optimizer_states(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], kinds: Sequence[str]
    ) -> list[dict[str, Any]]:
        """What goes into optimizers of these `kinds`, whose groups are those of `optimizers`."""
        states, names = self._get("optimizer", self._device), names_of(model)
        if len(states) != len(optimizers):
            raise ValueError(f"{self.path}: it has {len(states)} optimizers, here are {len(optimizers)}")
        likes = {own_name(name): p for name, p in model.named_parameters()}
        for state, optimizer, kind in zip(states, optimizers, kinds, strict=True):
            try:
                check_optimizer(state, kind, group_names(optimizer, names))
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
            for name, values in state["state"].items():
                for key, value in values.items():
                    values[key] = placed(value, likes[name], self._pieces, "optimizer:")
        return list(states)

    def _get(self, name: str, on: torch.device | None = None) -> Any:
        tree = json.loads((self.path / f"{name}.json").read_text())
        file = self.path / f"{name}.safetensors"
        return unpack(tree, load_file(file), on)


def own_state(model: nn.Module) -> dict[str, Any]:
    """A model's state dict by own names."""
    state = model.state_dict()
    return {own: state[key] for key, own in own_keys(state).items()}


def load_own_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    model.load_state_dict({key: state[own] for key, own in own_keys(model.state_dict()).items()})


def state_of(x: Any) -> Any:
    return None if x is None else x.state_dict()


def _refuse_shards(name: str, tensors: Mapping[str, Tensor]) -> None:
    for key, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(f"{name}: {key} is a DTensor; give its state_dict this rank's part, x.to_local()")


def _own(rank: int) -> str:
    return f"rank-{rank:05d}"


def _put(
    path: Path, tree: Any, tensors: dict[str, Tensor], about: dict[str, str] | None = None
) -> list[Path]:
    text, binary = path.with_suffix(".json"), path.with_suffix(".safetensors")
    text.write_text(json.dumps(tree, allow_nan=False) + "\n")
    try:
        save_file(storable(tensors), binary, {"format": "pt"} | (about or {}))
    except SafetensorError as error:
        raise OSError(f"{binary}: {error}") from None
    return [text, binary]


def _form(x: Any) -> str:
    if not isinstance(x, Tensor | Shards):
        return type(x).__name__
    return f"{'×'.join(map(str, x.shape)) or 'a single'} {str(x.dtype).removeprefix('torch.')}"
