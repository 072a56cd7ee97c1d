"""`convert` and `merge`: `factorize_` and `merge_` for checkpoint files.

Safetensors files are read lazily and written as a stream, one layer at a time, so that a checkpoint may be larger than
the memory.
"""

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
from .optimizer_state_dict import convert_optimizer
from .state_dict import LazyTensor, Source, factorized, merged, resolve

_INDEX = "model.safetensors.index.json"
_TORCH_WEIGHTS = "pytorch_model.bin"
_OPTIMIZER = "optimizer.pt"
_TRAINING = "training.json"  # written by `pufferfish.Checkpoint`
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def convert(checkpoint: str | Path, plan: Plan, out: str | Path) -> Plan:
    """Make the model of a checkpoint low-rank, as `factorize_` does.

    Args:
        checkpoint: Safetensors file, `torch.save` file (tensors and plain containers only) or Hugging Face folder. A
            `torch.save` file may hold the state dict under any key; optimizer states in it are converted too.
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the weights.
        out: New file or folder of the same kind. The plan with all ranks is written into the folder, or next to the
            file as `OUT.plan.json`.

    Returns:
        The plan with all ranks.
    """
    return _run(Path(checkpoint), Path(out), plan, back=False)


def merge(checkpoint: str | Path, out: str | Path, plan: Plan | None = None) -> Plan:
    """Make the model of a checkpoint dense again, as `merge_` does.

    Args:
        plan: The one that `convert` has written; by default it is read from the folder, or from next to the file.
    """
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
                    f"{checkpoint}: this is a training checkpoint; resume it with pf.Checkpoint, then call pf.merge_"
                )
            raise ValueError(f"{checkpoint}: its plan {beside.name} is missing; pass a plan")
    return _run(checkpoint, Path(out), plan, back=True)


def plan_file(out: Path) -> Path:
    """Where `convert` writes the plan of a converted file."""
    return out.with_name(f"{out.name}.plan.json")


def _run(checkpoint: Path, out: Path, plan: Plan, back: bool) -> Plan:
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint}: no such file or folder")
    if out.exists():
        raise ValueError(f"{out}: it already exists; choose another name or remove it")
    if back and not plan.resolved:
        raise ValueError("the plan has rules instead of ranks; pass the plan that convert has written")
    if checkpoint.is_dir():
        return _folder(checkpoint, out, plan, back)
    with _open(checkpoint) as loaded:
        if isinstance(loaded, Source):
            plan, tensors = _lazy_tensors(loaded, plan, back)
            with _new_file(out) as fresh:
                write_safetensors(fresh, tensors)
        else:
            plan, data = _torch_data(checkpoint, loaded, plan, back)
            with _new_file(out) as fresh:
                torch.save(data, fresh)
    if not back:
        plan.save(plan_file(out))
    return plan


def _lazy_tensors(source: Source, plan: Plan, back: bool) -> tuple[Plan, list[LazyTensor]]:
    if back:
        return plan, merged(source, plan)
    plan = resolve(source, plan)
    return plan, factorized(source, plan)


def _folder(folder: Path, out: Path, plan: Plan, back: bool) -> Plan:
    """Convert the weights of a Hugging Face folder, or of one that `save` has written, and copy its other files."""
    weights = {MANIFEST, WEIGHTS, _INDEX, _TORCH_WEIGHTS}
    if (folder / _INDEX).is_file():
        shards = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
        weights |= shards
    elif (folder / WEIGHTS).is_file():
        shards = {WEIGHTS}
    elif (folder / _TORCH_WEIGHTS).is_file():
        shards = {_TORCH_WEIGHTS}
    else:
        raise ValueError(f"{folder}: it has none of {WEIGHTS}, {_INDEX} and {_TORCH_WEIGHTS}")
    with contextlib.ExitStack() as stack:
        sources = []
        for shard in sorted(shards):
            loaded = stack.enter_context(_open(folder / shard))
            sources.append(loaded if isinstance(loaded, Source) else Source.of(loaded))
        source = _joined(sources)
        plan, tensors = _lazy_tensors(source, plan, back)
        with new_folder(out) as fresh:
            write_safetensors(fresh / WEIGHTS, tensors)
            for item in folder.iterdir():
                if item.is_file() and item.name not in weights | {_OPTIMIZER}:
                    shutil.copy2(item, fresh / item.name)
            if (folder / _OPTIMIZER).is_file():  # written by the Trainer of transformers
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
    """Open a safetensors file as a lazy `Source`, and any other file with `torch.load`."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                shapes = {
                    key: (torch.Size(s.get_shape()), _DTYPES[s.get_dtype()]) for key, s in slices.items()
                }
                yield Source(shapes, file.get_tensor)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a complete safetensors file ({error})") from None
        return
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: neither a .safetensors file nor a complete torch.save file of torch 1.6 or later"
        )
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: it contains more than tensors and plain containers: {reason}") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a complete torch.save file ({error})") from None
    yield data


def _torch_data(path: Path, data: Any, plan: Plan, back: bool) -> tuple[Plan, Any]:
    """Convert the state dict in nested containers, and the optimizer states next to it."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: it contains a {type(data).__name__}, not a state dict")
    places = [None] if _is_state(data) else [key for key, value in data.items() if _is_state(value)]
    found, problem = None, "it does not contain a state dict"
    for place in places:
        state = data if place is None else data[place]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        try:
            plan, lazy = _lazy_tensors(Source.of(tensors), plan, back)
        except ValueError as error:
            problem = str(error)
            continue
        converted = {m.name: m.make() for m in lazy}
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


def write_safetensors(path: Path, tensors: list[LazyTensor]) -> None:
    """Compute and write tensors one by one. The format is: header length, JSON header, raw bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for m in tensors:
        start, end = end, end + m.shape.numel() * m.dtype.itemsize
        header[m.name] = {"dtype": _NAMES[m.dtype], "shape": list(m.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for m in tensors:
            value = m.make().contiguous()
            assert value.shape == m.shape and value.dtype == m.dtype, m.name  # noqa: PT018
            file.write(value.view(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `path` when it is complete."""
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
