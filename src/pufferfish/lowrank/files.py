"""Models in files: `save` and `load` a low-rank model. safetensors and JSON, nothing is pickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..layers import LowRank, hollow
from ..layers.names import own_keys, unwrap
from ..planning.plan import Plan
from .factorize import plan_of, reshape_, set_parameter

WEIGHTS = "model.safetensors"
MANIFEST = "pufferfish.json"
_VERSION = 1


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model, low-rank or not, to `folder`: its weights, and the plan that gives a dense one its shape.

    The folder appears whole or not at all; an older one of ours is replaced.

    >>> import pufferfish as pf, tempfile, torch
    >>> build = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> model = build()
    >>> _ = pf.factorize_(model, pf.plan(model))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pf.save(model, f"{folder}/small")
    ...     same = build()
    ...     _ = pf.load(same, f"{folder}/small")
    >>> torch.equal(model[0].up.weight, same[0].up.weight)
    True
    """
    model = unwrap(model)
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, int, Any]] = set()
    state = model.state_dict()
    for key, name in own_keys(state).items():
        value = state[key].detach()
        place = value.data_ptr(), value.storage_offset(), value.shape
        if value.numel() and place in seen:
            continue  # a tied weight is written once
        seen.add(place)
        tensors[name] = value.contiguous()
    with new_folder(Path(folder)) as fresh:
        save_file(tensors, fresh / WEIGHTS, {"format": "pt"})
        write_manifest(fresh, plan_of(model))


def load(model: nn.Module, folder: str | Path) -> Plan:
    """Give a freshly built dense model the structure and the weights of `save`'s folder, in place.

    Everything is read and compared first: after an error the model is as it was. A model on the meta
    device receives the tensors themselves.

    Returns:
        The plan the model now has.
    """
    folder, model = Path(folder), unwrap(model)
    plan = read_manifest(folder)
    shadow = hollow(model)  # the trial: same names and shapes, no memory
    dense = not any(isinstance(m, LowRank) for m in model.modules())
    try:
        if dense:
            reshape_(shadow, plan)
        file = load_file(folder / WEIGHTS)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: {error}") from None
    state = shadow.state_dict(keep_vars=True)
    wanted = {own: state[key] for key, own in own_keys(state).items()}
    # A tied weight was written under one of its names.
    values = {id(wanted[name]): value for name, value in file.items() if name in wanted}
    for name in file:
        if name not in wanted:
            raise ValueError(f"{folder}: it has {name}, which the model does not")
    for name, tensor in wanted.items():
        value = values.get(id(tensor))
        if value is None:
            raise ValueError(f"{folder}: it lacks {name}, which the model has")
        if value.shape != tensor.shape:
            there, here = ("×".join(map(str, x.shape)) for x in (value, tensor))
            raise ValueError(f"{folder}: {name} is {there} there and {here} in the model")
    if dense:
        reshape_(model, plan)
    meta = any(p.is_meta for p in model.parameters())
    own = own_keys(model.state_dict())
    model.load_state_dict({key: values[id(wanted[name])] for key, name in own.items()}, assign=meta)
    if meta:  # assigning gave each name a parameter of its own: tie again what was tied
        first: dict[int, nn.Parameter] = {}
        for key, parameter in list(model.named_parameters(remove_duplicate=False)):
            set_parameter(model, key, first.setdefault(id(wanted[own[key]]), parameter))
    return plan


def write_manifest(folder: Path, plan: Plan) -> None:
    """The plan, and by what to know that the weights beside it are whole."""
    weights = folder / WEIGHTS
    data = {
        "pufferfish": _VERSION,
        "weights": {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": sha256(weights)},
        "plan": json.loads(plan.to_json()),
    }
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n")


def read_manifest(folder: Path) -> Plan:
    """The plan of a saved folder, after checking that its weights are whole."""
    manifest, weights = folder / MANIFEST, folder / WEIGHTS
    for path in (manifest, weights):
        if not path.is_file():
            raise ValueError(
                f"{folder}: there is no {path.name}; this is not a folder that pufferfish.save wrote"
            )
    try:
        data = json.loads(manifest.read_text())
        version, expected = data["pufferfish"], data["weights"]
        size, digest = expected["bytes"], expected["sha256"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{manifest}: damaged, or not written by pufferfish.save") from None
    if version != _VERSION:
        raise ValueError(f"{manifest}: format {version}, this pufferfish reads {_VERSION}")
    if weights.stat().st_size != size:
        raise ValueError(
            f"{weights}: {weights.stat().st_size:,} bytes instead of {size:,}; the copy is incomplete"
        )
    if sha256(weights) != digest:
        raise ValueError(f"{weights}: damaged, its SHA-256 is not the one in {MANIFEST}")
    try:
        return Plan.from_json(json.dumps(data.get("plan")))
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `path` only when it is complete."""
    if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: it exists and pufferfish did not write it; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read
            sync(file)
        fresh.chmod(0o755)
        if path.exists():
            old = fresh.with_name(f"{fresh.name}.old")
            path.rename(old)
            fresh.rename(path)
            shutil.rmtree(old)
        else:
            fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, on disk and not only in memory."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
