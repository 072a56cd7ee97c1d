"""`factorize_state_dict` and `merge_state_dict`: `factorize_` and `merge_` for state dicts, without a model, and files of them.

Files of weights are safetensors, in one file or in several with an index, and `torch.save` files. Safetensors files are
read lazily and written as a stream, one tensor at a time, so that a checkpoint may be larger than the memory.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..layers import Part, own_keys, own_name
from ..layers.matrix import product
from ..planning import (
    Plan,
    apply_rules,
    check_is_plan,
    errors_name,
    matrix_spectrum,
    progress,
    read_json,
    svd,
    track,
    write_text,
)

Get = Callable[[str], Tensor]

#: Size in bytes from which weights are split into several files.
MAX_SHARD = 5_000_000_000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Source:
    """A state dict that need not be in memory: `get` reads one tensor."""

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    get: Callable[[str], Tensor]

    @staticmethod
    def of(state_dict: Mapping[str, Tensor]) -> Source:
        return Source({k: (v.shape, v.dtype) for k, v in state_dict.items()}, state_dict.__getitem__)

    @staticmethod
    def of_lazy(tensors: Iterable[LazyTensor]) -> Source:
        by_name = {tensor.name: tensor for tensor in tensors}
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in by_name.items()}
        return Source(shapes, lambda name: by_name[name].make())


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a converted state dict, computed by `make`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def factorize_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Make the state dict of a dense model low-rank, as `factorize_` does.

    Args:
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the weights.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> low_rank = pf.lowrank.factorize_state_dict(model.state_dict(), pf.plan(model))
    >>> {name: tuple(tensor.shape) for name, tensor in low_rank.items()}
    {'0.down.weight': (16, 64), '0.up.weight': (64, 16), '0.up.bias': (64,)}
    """
    check_is_plan(plan, "factorize_state_dict")
    source = Source.of(state_dict)
    return {tensor.name: tensor.make() for tensor in factorized(source, resolve(source, plan))}


def merge_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Make the state dict of a low-rank model dense again, as `merge_` does.

    Args:
        plan: With all ranks.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> plan = pf.plan(model)
    >>> list(merge_state_dict(pf.lowrank.factorize_state_dict(model.state_dict(), plan), plan))
    ['0.weight', '0.bias']
    """
    check_is_plan(plan, "merge_state_dict")
    return {tensor.name: tensor.make() for tensor in merged(Source.of(state_dict), plan)}


def resolve(source: Source, plan: Plan) -> Plan:
    """The plan with all ranks; rank rules are resolved with the weights of the state dict."""
    keys = {own: key for key, own in own_keys(source.shapes).items()}
    spectra = {}
    for e in track(
        [e for e in plan.entries if e.rule is not None and e.matrix is not None], "choosing ranks"
    ):
        assert e.matrix is not None
        name = own_name(e.layer, e.matrix.weight)
        if name not in keys:
            raise ValueError(f"{e.name}: the checkpoint has no tensor {name!r}; pass the plan of this model")
        spectra[e.name] = matrix_spectrum(e, source.get(keys[name]))
    return apply_rules(plan, spectra) if spectra else plan


def factorized(source: Source, plan: Plan) -> list[LazyTensor]:
    """The low-rank state dict, in the order of the dense one. Checks names and shapes; computes nothing yet."""
    factor_map, own = plan.factor_map, own_keys(source.shapes)
    keys = {name: key for key, name in own.items()}
    for name, parts in factor_map.parts.items():
        for part in parts:
            _check(part, source, keys, name)
    tensors: list[LazyTensor] = []
    for key, name in own.items():
        if name not in factor_map.parts:
            tensors += _unchanged(key, source)
            continue

        def split(get: Get, key: str = key, name: str = name) -> dict[str, Tensor]:
            value, layer = get(key), factor_map.parts[name][0].layer
            pieces = factor_map.split(name, value, _factors)
            return {_key(key, layer, name, target): x.to(value.dtype) for target, x in pieces}

        tensors += together(split, source)
    return tensors


def merged(source: Source, plan: Plan) -> list[LazyTensor]:
    """The dense state dict, in the order of the low-rank one. Checks names; computes nothing yet."""
    factor_map, own = plan.factor_map, own_keys(source.shapes)
    keys = {name: key for key, name in own.items()}
    dense = {target: name for name, targets in factor_map.targets.items() for target in targets}
    for target, name in dense.items():
        _check(factor_map.parts[name][0], source, keys, target)
    tensors: list[LazyTensor] = []
    done: set[str] = set()
    for key, target in own.items():
        name = dense.get(target, "")
        if not name:
            tensors += _unchanged(key, source)
        elif name not in done:
            done.add(name)

            def join(get: Get, key: str = key, target: str = target, name: str = name) -> dict[str, Tensor]:
                layer = factor_map.parts[name][0].layer
                out = get(key).new_empty(factor_map.shape(name))
                whole = factor_map.join(name, lambda part: get(keys[part]), product, out)
                return {_key(key, layer, target, name): whole}

            tensors += together(join, source)
    return tensors


def together(convert: Callable[[Get], dict[str, Tensor]], source: Source) -> list[LazyTensor]:
    """The tensors that `convert` makes of some tensors of the source.

    Their shapes are those of a run on the meta device. All are computed for the first that is asked for, and each is
    forgotten when it is taken.
    """
    held: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in held:
            held.update(convert(source.get))
        return held.pop(name)

    on_meta = convert(lambda key: _meta(*source.shapes[key]))
    return [LazyTensor(name, x.shape, x.dtype, partial(make, name)) for name, x in on_meta.items()]


def _unchanged(key: str, source: Source) -> list[LazyTensor]:
    return [LazyTensor(key, *source.shapes[key], partial(source.get, key))]


def _factors(part: Part, W: Tensor) -> tuple[Tensor, Tensor]:
    assert part.rank is not None
    if W.is_meta:
        return W.new_empty(*W.shape[:2], part.rank), W.new_empty(len(W), part.rank, W.shape[2])
    svd.check_values(part.name, W)
    return svd.split(W, part.rank)[:2]


def _key(key: str, layer: str, name: str, new: str) -> str:
    """Key of the tensor `new` of a layer, where that of its tensor `name` is `key`, with the prefixes of its wrappers."""
    return key.removesuffix(name.removeprefix(f"{layer}.")) + new.removeprefix(f"{layer}.")


def _check(part: Part, source: Source, keys: Mapping[str, str], name: str) -> None:
    """Raise ValueError unless the state dict has the tensor `name`, a dense one with a shape of which `part` is a part."""
    if name not in keys:
        raise ValueError(f"{part.name}: the checkpoint has no tensor {name!r}; pass the plan of this model")
    x, (shape, _) = part.matrix, source.shapes[keys[name]]
    if part.rank is None or name != part.source:
        return
    if len(shape) != len(x.shape) or torch.empty(shape, device="meta")[part.index].shape != x.shape:
        shape_text, planned = ("×".join(map(str, s)) for s in (shape, x.shape))
        raise ValueError(
            f"{part.name}: the plan is for a weight of {planned}, but {keys[name]!r} of the checkpoint is {shape_text}"
        )


def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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
