"""Files of weights: safetensors, in one file or in several with an index, and `torch.save` files.

Safetensors files are read lazily and written as a stream, one tensor at a time, so that a checkpoint may be larger than
the memory.
"""

import contextlib
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..planning.json_file import errors_name, read_json, write_text
from ..planning.text import progress
from .state_dict import LazyTensor, Source

#: Size in bytes from which weights are split into several files.
MAX_SHARD = 5_000_000_000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Open a safetensors file as a lazy `Source`, and any other file with `torch.load`."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            with errors_name(path):
                opened = safe_open(path, framework="pt")
            with opened as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                for key, value in slices.items():
                    if value.get_dtype() not in _DTYPES:
                        raise ValueError(f"{path}: {key} has the unsupported dtype {value.get_dtype()}")
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
        kind = re.search(
            r"GLOBAL (\S+)", str(error)
        )  # torch advises to switch off weights_only: do not repeat it
        raise ValueError(
            f"{path}: it contains {kind[1] if kind else 'pickled objects'}, but only tensors and plain containers "
            "are read; save the state_dict of the model and of the optimizer instead"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a complete torch.save file ({error})") from None
    yield data


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Source]:
    """Open the weights in a file, or in the files that an index (`….index.json`) lists, as one `Source`.

    Only the tensors that the index lists are read, each from the file that it names.
    """
    parts = read_index(path)
    where: dict[str, Source] = {}
    with contextlib.ExitStack() as stack:
        for name, keys in parts.items():
            file = path.with_name(name)
            loaded = stack.enter_context(open_file(file))
            source = loaded if isinstance(loaded, Source) else _source(file, loaded)
            for key in source.shapes if keys is None else keys:
                if key not in source.shapes:
                    raise ValueError(f"{file}: it does not have the tensor {key}, which {path.name} lists")
                where[key] = source
        shapes = {key: source.shapes[key] for key, source in where.items()}
        yield Source(shapes, lambda key: where[key].get(key))


def _source(path: Path, data: Any) -> Source:
    if not isinstance(data, Mapping) or not all(isinstance(x, Tensor) for x in data.values()):
        raise ValueError(f"{path}: it does not contain a state dict")
    return Source.of(data)


def read_index(path: Path) -> dict[str, list[str] | None]:
    """Names of the tensors by file, for a file of weights or an index; None means all tensors of the file."""
    if path.suffix != ".json":
        return {path.name: None}
    data = read_json(path)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path}: damaged, its weight_map does not map tensors to files")
    parts: dict[str, list[str]] = {}
    for key, file in files.items():
        if file != Path(file).name or file in ("", ".", ".."):
            raise ValueError(f"{path}: it lists the file {file!r} for {key}, which is not in its folder")
        parts.setdefault(file, []).append(key)
    return {file: parts[file] for file in sorted(parts)}


def write_weights(
    folder: Path, stem: str, tensors: list[LazyTensor], max_shard: int = MAX_SHARD
) -> list[str]:
    """Compute and write tensors one by one.

    Args:
        stem: names the files: `STEM.safetensors`, or `STEM-00001-of-00003.safetensors` … with an index.
        max_shard: bytes in a file. A larger tensor has a file of its own.

    Returns:
        Names of the files with weights, and of the index, which comes last.
    """
    shards: list[list[LazyTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    names = [f"{stem}.safetensors"]
    if count > 1:
        names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    if count == 1:
        return names
    index = index_name(stem)
    where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    data = {"metadata": {"total_size": total}, "weight_map": where}
    write_text(folder / index, json.dumps(data, indent=1) + "\n")
    return [*names, index]


def index_name(stem: str) -> str:
    """Name of the index of weights in several files."""
    return f"{stem}.safetensors.index.json"


def check_dtype(where: str | Path, name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `open_weights` reads this dtype."""
    if dtype not in _NAMES:
        raise ValueError(f"{where}: {name} is {dtype}, which cannot be saved; convert it to another dtype")


def write_safetensors(path: Path, tensors: list[LazyTensor]) -> None:
    """Compute and write tensors one by one. The format is: header length, JSON header, raw bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for m in tensors:
        start, end = end, end + m.nbytes
        check_dtype(path, m.name, m.dtype)
        header[m.name] = {"dtype": _NAMES[m.dtype], "shape": list(m.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with errors_name(path), path.open("wb") as file, progress("writing weights", end) as advance:
        file.write(struct.pack("<Q", len(text)) + text)
        for m in tensors:
            value = m.make().cpu().contiguous()
            assert value.shape == m.shape and value.dtype == m.dtype, m.name  # noqa: PT018
            file.write(value.view(-1).view(torch.uint8).numpy().data)
            advance(m.nbytes)
