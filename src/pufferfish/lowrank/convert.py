"""The switch and the way back on checkpoint files, for launchers that restart from them.

A layer at a time: safetensors are read lazily and written as a stream, so that a checkpoint larger than
memory can be converted.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..planning.plan import Plan
from .files import MANIFEST, WEIGHTS, new_folder, read_manifest, sync, write_manifest
from .state_dict import Made, Source, convert_optimizer, factorized, merged, resolve

_INDEX = "model.safetensors.index.json"
_TORCH_WEIGHTS = "pytorch_model.bin"
_OPTIMIZER = "optimizer.pt"
_TRAINING = "training.json"  # in what `Checkpoint` writes
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def convert(checkpoint: str | Path, plan: Plan, out: str | Path) -> Plan:
    """What `factorize_` does to a model, done to its checkpoint.

    Reads safetensors files, `torch.save` files (tensors and plain containers only) and Hugging Face
    folders. A `torch.save` file may hold the state dict under any key; optimizer states beside it are
    carried along. `out` is of the same kind as the checkpoint. The plan with all its ranks goes into the
    folder, or beside the file as `OUT.plan.json`.
    """
    return _run(Path(checkpoint), Path(out), plan, back=False)


def merge(checkpoint: str | Path, out: str | Path, plan: Plan | None = None) -> Plan:
    """What `merge_` does to a model, done to its checkpoint; the plan is found beside it."""
    checkpoint = Path(checkpoint)
    if plan is None:
        beside = plan_file(checkpoint)
        if (checkpoint / MANIFEST).is_file():
            plan = read_manifest(checkpoint)
        elif beside.is_file():
            plan = Plan.load(beside)
        else:
            if (checkpoint / _TRAINING).is_file():
                raise ValueError(
                    f"{checkpoint}: this is a training checkpoint; resume it by pf.Checkpoint, then pf.merge_ the model"
                )
            raise ValueError(f"{checkpoint}: no plan lies beside it ({beside.name}); name one")
    return _run(checkpoint, Path(out), plan, back=True)


def plan_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.plan.json")


def _run(checkpoint: Path, out: Path, plan: Plan, back: bool) -> Plan:
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint}: there is no such file or folder")
    if out.exists():
        raise ValueError(f"{out}: it exists already; choose another name or remove it")
    if back and not plan.resolved:
        raise ValueError(
            "the plan still holds rules; merging needs the ranks, take the plan that convert wrote"
        )
    if checkpoint.is_dir():
        return _folder(checkpoint, out, plan, back)
    with _open(checkpoint) as loaded:
        if isinstance(loaded, Source):
            plan, made = _made(loaded, plan, back)
            with _new_file(out) as fresh:
                write_safetensors(fresh, made)
        else:
            plan, data = _torch_data(checkpoint, loaded, plan, back)
            with _new_file(out) as fresh:
                torch.save(data, fresh)
    if not back:
        plan.save(plan_file(out))
    return plan


def _made(source: Source, plan: Plan, back: bool) -> tuple[Plan, list[Made]]:
    if back:
        return plan, merged(source, plan)
    plan = resolve(source, plan)
    return plan, factorized(source, plan)


def _folder(folder: Path, out: Path, plan: Plan, back: bool) -> Plan:
    """A Hugging Face folder (or one of ours): the weights converted, everything else copied."""
    weights = {MANIFEST, WEIGHTS, _INDEX, _TORCH_WEIGHTS}
    if (folder / _INDEX).is_file():
        shards = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
        weights |= shards
    elif (folder / WEIGHTS).is_file():
        shards = {WEIGHTS}
    elif (folder / _TORCH_WEIGHTS).is_file():
        shards = {_TORCH_WEIGHTS}
    else:
        raise ValueError(f"{folder}: it has neither {WEIGHTS}, {_INDEX} nor {_TORCH_WEIGHTS}")
    with contextlib.ExitStack() as stack:
        sources = []
        for shard in sorted(shards):
            loaded = stack.enter_context(_open(folder / shard))
            sources.append(loaded if isinstance(loaded, Source) else Source.of(loaded))
        source = _joined(sources)
        plan, made = _made(source, plan, back)
        with new_folder(out) as fresh:
            write_safetensors(fresh / WEIGHTS, made)
            for item in folder.iterdir():
                if item.is_file() and item.name not in weights | {_OPTIMIZER}:
                    shutil.copy2(item, fresh / item.name)
            if (folder / _OPTIMIZER).is_file():  # a checkpoint of the transformers Trainer
                saved = stack.enter_context(_open(folder / _OPTIMIZER))
                now = stack.enter_context(_open(fresh / WEIGHTS))
                dense, low_rank = (now, source) if back else (source, now)
                torch.save(convert_optimizer(saved, dense, low_rank, plan, back=back), fresh / _OPTIMIZER)
            if not back:
                write_manifest(fresh, plan)
    return plan


def _joined(sources: list[Source]) -> Source:
    where = {key: source for source in sources for key in source.shapes}
    shapes = {key: source.shapes[key] for key, source in where.items()}
    return Source(shapes, lambda key: where[key].get(key))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A safetensors file as a lazy `Source`, anything else as what `torch.load` makes of it."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                shapes = {
                    key: (torch.Size(s.get_shape()), _DTYPES[s.get_dtype()]) for key, s in slices.items()
                }
                yield Source(shapes, file.get_tensor)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
        return
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: this is neither a .safetensors file nor a whole one that torch.save wrote since torch 1.6"
        )
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: it holds more than tensors and plain containers: {reason}") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a whole torch.save file ({error})") from None
    yield data


def _torch_data(path: Path, data: Any, plan: Plan, back: bool) -> tuple[Plan, Any]:
    """The same nest of containers with its state dict, and the optimizer states beside it, converted."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: it holds a {type(data).__name__}, not a state dict")
    places = [None] if _is_state(data) else [key for key, value in data.items() if _is_state(value)]
    found, problem = None, "it holds no state dict"
    for place in places:
        state = data if place is None else data[place]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        try:
            plan, made = _made(Source.of(tensors), plan, back)
        except ValueError as error:
            problem = str(error)
            continue
        converted = {m.name: m.make() for m in made}
        others = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if place is None:
            return plan, {**converted, **others}
        found = found or (tensors, converted)
        data = {**data, place: {**converted, **others}}
    if found is None:
        raise ValueError(f"{path}: {problem}")
    dense, low_rank = reversed(found) if back else found
    for key, value in data.items():
        if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
            data[key] = convert_optimizer(dict(value), Source.of(dense), Source.of(low_rank), plan, back=back)
    return plan, data


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(x, Tensor) for x in value.values())


def write_safetensors(path: Path, made: list[Made]) -> None:
    """Write tensors one by one as they are made. The format: header length, JSON header, raw bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for m in made:
        start, end = end, end + m.shape.numel() * m.dtype.itemsize
        header[m.name] = {"dtype": _NAMES[m.dtype], "shape": list(m.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for m in made:
            value = m.make().contiguous()
            assert value.shape == m.shape and value.dtype == m.dtype, m.name  # noqa: PT018
            file.write(value.view(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A file to write that takes its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    fresh = Path(name)
    try:
        yield fresh
        sync(fresh)
        fresh.chmod(0o644)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
