"""`save` and `load`: low-rank models in safetensors and JSON files. Nothing is pickled."""

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

from ..layers import LowRank, meta_copy
from ..layers.names import own_keys, unwrap
from ..planning.plan import Plan
from .factorize import plan_of, reshape_, set_parameter

WEIGHTS = "model.safetensors"
MANIFEST = "pufferfish.json"
_VERSION = 1


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model, low-rank or dense, to `folder`: its weights, and the plan with the ranks of its layers.

    The folder appears when it is complete. A folder that `save` has written before is replaced.

    Args:
        model: With or without wrappers.

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
            continue  # write a tied weight once
        seen.add(place)
        tensors[name] = value.contiguous()
    with new_folder(Path(folder)) as fresh:
        save_file(tensors, fresh / WEIGHTS, {"format": "pt"})
        write_manifest(fresh, plan_of(model))


def load(model: nn.Module, folder: str | Path) -> Plan:
    """Load structure and weights from a folder that `save` has written, in place.

    Everything is read and compared first, so an error leaves the model unchanged. The tensors are assigned to a model
    on the meta device, and copied to others.

    Args:
        model: A newly built dense model, or one that already has the low-rank structure.

    Returns:
        The plan of the loaded model.
    """
    folder, model = Path(folder), unwrap(model)
    plan = read_manifest(folder)
    trial = meta_copy(model)  # to compare names and shapes before the model is changed
    dense = not any(isinstance(m, LowRank) for m in model.modules())
    try:
        if dense:
            reshape_(trial, plan)
        file = load_file(folder / WEIGHTS)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: {error}") from None
    state = trial.state_dict(keep_vars=True)
    expected = {own: state[key] for key, own in own_keys(state).items()}
    # A tied weight was written under one of its names.
    values = {id(expected[name]): value for name, value in file.items() if name in expected}
    for name in file:
        if name not in expected:
            raise ValueError(f"{folder}: it has the tensor {name}, which the model does not have")
    for name, tensor in expected.items():
        value = values.get(id(tensor))
        if value is None:
            raise ValueError(f"{folder}: it does not have the tensor {name} of the model")
        if value.shape != tensor.shape:
            there, here = ("×".join(map(str, x.shape)) for x in (value, tensor))
            raise ValueError(f"{folder}: {name} is {there} in the file and {here} in the model")
    if dense:
        reshape_(model, plan)
    meta = any(p.is_meta for p in model.parameters())
    own = own_keys(model.state_dict())
    model.load_state_dict({key: values[id(expected[name])] for key, name in own.items()}, assign=meta)
    if meta:  # assigning created a parameter for each name: tie them again
        first: dict[int, nn.Parameter] = {}
        for key, parameter in list(model.named_parameters(remove_duplicate=False)):
            set_parameter(model, key, first.setdefault(id(expected[own[key]]), parameter))
    return plan


def write_manifest(folder: Path, plan: Plan) -> None:
    """Write the plan, and the size and SHA-256 of the weights."""
    weights = folder / WEIGHTS
    data = {
        "pufferfish": _VERSION,
        "weights": {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": sha256(weights)},
        "plan": json.loads(plan.to_json()),
    }
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n")


def read_manifest(folder: Path) -> Plan:
    """Read the plan of a saved folder, and check that its weights are complete."""
    manifest, weights = folder / MANIFEST, folder / WEIGHTS
    for path in (manifest, weights):
        if not path.is_file():
            raise ValueError(
                f"{folder}: {path.name} is missing; this is not a folder that pufferfish.save wrote"
            )
    try:
        data = json.loads(manifest.read_text())
        version, expected = data["pufferfish"], data["weights"]
        size, digest = expected["bytes"], expected["sha256"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{manifest}: damaged, or not written by pufferfish.save") from None
    if version != _VERSION:
        raise ValueError(f"{manifest}: its format is {version}, but this pufferfish reads format {_VERSION}")
    if weights.stat().st_size != size:
        raise ValueError(
            f"{weights}: {weights.stat().st_size:,} bytes instead of {size:,}; the copy is incomplete"
        )
    if sha256(weights) != digest:
        raise ValueError(f"{weights}: damaged, its SHA-256 differs from the one in {MANIFEST}")
    try:
        return Plan.from_json(json.dumps(data.get("plan")))
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when it is complete."""
    if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: it already exists and was not written by pufferfish; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes files that only the owner can read
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
    """Flush the content of a file, or the names in a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
