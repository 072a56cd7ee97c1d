"""`save` and `load`: low-rank models in safetensors and JSON files. Nothing is pickled."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import index
from pathlib import Path

from torch import Tensor, nn

from ..layers import LowRank, meta_copy, own_keys, unwrap
from ..planning import Plan, read_json, write_text
from ..planning.json_file import check_file, file_record, sync
from .factorize import check_not_sharded, plan_of, reshape_
from .factors import nan_factors
from .optimizers import warn_of_other_optimizers
from .rewrite import Rewrite, commit, set_parameter
from .state_dict import LazyTensor, check_dtype, index_name, open_weights, write_safetensors

WEIGHTS = "model.safetensors"
LOW_RANK = "pufferfish"  # instead of "model" in the names of weights in low-rank Hugging Face folders
MANIFEST = "pufferfish.json"
#: Where transformers looks for weights, in this order.
DENSE_FILES = (WEIGHTS, index_name("model"), "pytorch_model.bin", "pytorch_model.bin.index.json")
_VERSION = 2


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model, low-rank or dense, to `folder`: its weights, and the plan with the ranks of its layers.

    A new folder appears when it is complete. In a folder that `save` or `save_pretrained` has written before,
    the weights and the plan are replaced, and other files stay.

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
    check_not_sharded(model, "save")
    tensors: list[LazyTensor] = []
    written: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for key, name in own_keys(state).items():
        value = state[key]
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name}: extra state of type {type(value).__name__} cannot be saved, only tensors"
            )
        if id(value) in written:
            continue  # write a tied weight once
        written.add(id(value))
        if value.is_meta:
            raise ValueError(f"save: {name} is on the meta device, without values; load the weights first")
        check_dtype("save", name, value.dtype)
        tensors.append(LazyTensor(name, value.shape, value.dtype, value.detach))
    plan, folder = plan_of(model), Path(folder)
    # transformers would load low-rank weights of its own name at random.
    file = f"{LOW_RANK}.safetensors" if plan.ranks and (folder / "config.json").is_file() else WEIGHTS
    with new_folder(folder) as fresh:
        write_safetensors(fresh / file, sorted(tensors, key=lambda x: -x.dtype.itemsize))  # for aligned reads
        write_manifest(fresh, plan, [file])


def load(model: nn.Module, folder: str | Path) -> Plan:
    """Load structure and weights from a folder that `save` has written, in place.

    Everything is read and compared first, so an error leaves the model unchanged. The tensors are assigned to a model
    on the meta device, and copied to others.

    Args:
        model: A newly built dense model, or one that already has the low-rank structure. Create its optimizer
            afterwards.
        folder: From `save`, `pufferfish convert` or `save_pretrained` of a low-rank transformers model.

    Returns:
        The plan of the loaded model.
    """
    folder, model = Path(folder), unwrap(model)
    plan, weights = read_manifest(folder)
    trial = meta_copy(model)  # to compare names and shapes before the model is changed
    dense = not any(isinstance(m, LowRank) for m in model.modules())
    try:
        if dense:
            reshape_(trial, plan)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    _check_buffers(folder, model)
    meta = any(value.is_meta for value in model.state_dict().values())
    # transformers does not save weights that a model computes when it is built.
    left_out = () if meta else getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = trial.state_dict(keep_vars=True)
    expected = {own: state[key] for key, own in own_keys(state).items()}
    values = _read_values(folder, weights, expected, left_out)
    if dense:
        warn_of_other_optimizers(model, plan, [], "create it after load")
        change = Rewrite(model)
        change.factorize(plan, nan_factors)
        commit([change])
    now = model.state_dict()
    own = own_keys(now)
    loaded = {key: values.get(id(expected[name]), now[key]) for key, name in own.items()}
    model.load_state_dict(loaded, assign=meta)
    if meta:  # assigning created a parameter for each name: tie them again
        first: dict[int, nn.Parameter] = {}
        for key, parameter in list(model.named_parameters(remove_duplicate=False)):
            set_parameter(model, key, first.setdefault(id(expected[own[key]]), parameter))
    return plan


def _read_values(
    folder: Path, weights: Path, expected: Mapping[str, Tensor], left_out: Collection[str]
) -> dict[int, Tensor]:
    """Read the weights by the id of the tensor that is to have them, after comparing names and shapes."""
    with open_weights(weights) as file:
        # A tied weight was written under one of its names.
        names = {id(expected[name]): name for name in file.shapes if name in expected}
        for name in file.shapes:
            if name not in expected:
                raise ValueError(f"{folder}: it has the tensor {name}, which the model does not have")
        for name, tensor in expected.items():
            if id(tensor) not in names:
                if name in left_out:
                    continue
                raise ValueError(f"{folder}: it does not have the tensor {name} of the model")
            shape, _ = file.shapes[names[id(tensor)]]
            if shape != tensor.shape:
                there, here = ("×".join(map(str, x)) for x in (shape, tensor.shape))
                raise ValueError(f"{folder}: {name} is {there} in the file and {here} in the model")
        return {key: file.get(name) for key, name in names.items()}


def _check_buffers(folder: Path, model: nn.Module) -> None:
    """Raise ValueError if buffers on the meta device cannot be loaded, because files do not have them."""
    saved = model.state_dict().keys()
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{folder}: the buffers {', '.join(names[:3])}{more} are on the meta device, and not in the file because "
            "they are registered with persistent=False; build the model on a real device, or load a transformers model "
            "by pufferfish.integrations.transformers.from_pretrained"
        )


def write_manifest(folder: Path, plan: Plan, files: Iterable[str] = (WEIGHTS,)) -> None:
    """Write the plan, and the size and SHA-256 of the weights.

    Args:
        files: names of the weights' files, and last of their index if there are several.
    """
    weights = [{"file": name, **file_record(folder / name)} for name in files]
    data = {"pufferfish": _VERSION, "weights": weights, "plan": plan.as_data()}
    write_text(folder / MANIFEST, json.dumps(data, indent=1) + "\n")


def read_manifest(folder: Path) -> tuple[Plan, Path]:
    """Read the plan of a saved folder, and check that its weights are complete.

    Returns:
        The plan, and the file of the weights or their index.
    """
    manifest = folder / MANIFEST
    if not folder.exists():
        raise ValueError(f"{folder}: no such folder")
    if not manifest.is_file():
        raise ValueError(
            f"{folder}: {MANIFEST} is missing; this is not a low-rank folder that pufferfish wrote"
        )
    try:
        data = read_json(manifest)
        version = data["pufferfish"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{manifest}: damaged, or not written by pufferfish") from None
    if version != _VERSION:
        raise ValueError(f"{manifest}: its format is {version}, but this pufferfish reads format {_VERSION}")
    try:
        weights = [
            (Path(x["file"]), {"bytes": index(x["bytes"]), "sha256": x["sha256"]}) for x in data["weights"]
        ]
        path = folder / weights[-1][0]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{manifest}: damaged, or not written by pufferfish") from None
    for file, record in weights:
        if file.name != str(file):
            raise ValueError(f"{manifest}: it lists the file {str(file)!r}, which is not in its folder")
        check_file(folder / file, record)
    dense = [name for name in DENSE_FILES if (folder / name).is_file()]
    if dense and path.name.startswith(LOW_RANK):
        raise ValueError(
            f"{folder}: it has dense weights ({dense[0]}) beside the low-rank ones ({path.name}); remove those that are "
            "out of date"
        )
    try:
        return Plan.from_data(data.get("plan")), path
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder. When it is complete, it is renamed to `path`, or its files are moved into `path`."""
    path = path.resolve()  # the folder that a link points to is written, and the link stays
    if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: it already exists and was not written by pufferfish; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = (path if path.exists() else path.parent) / f".{path.name}.{secrets.token_hex(4)}"
    try:
        fresh.mkdir()  # with the umask, which tempfile ignores
        yield fresh
        for file in fresh.rglob("*"):
            sync(file)
        if path.exists():
            move_files(fresh, path)
        else:
            fresh.rename(path)
    except OSError as error:
        if str(error.filename).startswith(str(fresh)):  # name the file as the user knows it
            error.filename = str(path) + error.filename.removeprefix(str(fresh))
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def move_files(fresh: Path, folder: Path) -> None:
    """Move the files of a saved folder into another, in place of the weights and the plan there; others stay."""
    # The manifest goes first and comes last: a folder with it is complete.
    (folder / MANIFEST).unlink(missing_ok=True)
    files = sorted(fresh.iterdir(), key=lambda file: file.name == MANIFEST)
    for file in files[:-1]:
        if file.is_dir():
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
        else:
            os.replace(file, folder / file.name)
    _remove_weights(folder, {file.name for file in files})
    os.replace(files[-1], folder / MANIFEST)


def _remove_weights(folder: Path, keep: set[str]) -> None:
    """Remove the weights of an earlier save, as `save_pretrained` of transformers overwrites them."""
    for stem in ("model", LOW_RANK):
        for pattern in (f"{stem}.safetensors", f"{stem}-*-of-*.safetensors", index_name(stem)):
            for file in folder.glob(pattern):
                if file.name not in keep:
                    file.unlink()
    for file in folder.glob("pytorch_model*.bin*"):  # transformers does not overwrite these
        if file.suffix != ".old":
            file.rename(file.with_name(f"{file.name}.old"))
