"""`convert` and `merge`: `factorize_` and `merge_` for checkpoint files and folders, one layer at a time."""

import contextlib
import fnmatch
import importlib.util
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..layers import own_keys, own_name
from ..lowrank.files import (
    DENSE_FILES,
    LOW_RANK,
    MANIFEST,
    new_folder,
    read_manifest,
    write_manifest,
)
from ..lowrank.optimizers import State
from ..lowrank.rewrite import Carrier, check_accepted
from ..lowrank.state_dict import (
    MAX_SHARD,
    LazyTensor,
    Source,
    factorized,
    merged,
    open_file,
    open_weights,
    resolve,
    write_safetensors,
    write_weights,
)
from ..planning import Plan, check_is_plan, errors_name, read_json, track, write_text
from ..planning.json_file import new_file
from .model_card import add_notice, remove_notice

Saved = dict[str, Any]  # an optimizer's `state_dict()`

_OPTIMIZER = "optimizer.pt"
_TRAINER = "trainer_state.json"
_TRAINING = "training.json"  # written by `pufferfish.Checkpoint`
#: Files with weights, in the formats of several libraries: they are converted or left out, and never copied.
_WEIGHT_FILES = (
    "*.safetensors", "*.safetensors.index*.json", "pytorch_model*", "tf_model*", "flax_model*", "*.gguf", "consolidated*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # the only folder among the files of a tokenizer


def convert(checkpoint: str | Path, plan: Plan, out: str | Path, *, max_shard: int = MAX_SHARD) -> Plan:
    """Make the model of a checkpoint low-rank, as `factorize_` does.

    Args:
        checkpoint: Safetensors file, `torch.save` file (tensors and plain containers only) or Hugging Face folder. A
            `torch.save` file may hold the state dict under any key; optimizer states in it are converted too.
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the weights.
        out: New file or folder of the same kind. The plan with all ranks is written into the folder, or next to the
            file as `OUT.plan.json`. `pufferfish.integrations.transformers.from_pretrained` loads a Hugging Face folder.
        max_shard: Largest size of a weight file in a folder, in bytes; larger weights are split into several files.

    Returns:
        The plan with all ranks.
    """
    check_is_plan(plan, "convert")
    return _run(Path(checkpoint), Path(out), plan, max_shard, back=False)


def merge(
    checkpoint: str | Path, out: str | Path, plan: Plan | None = None, *, max_shard: int = MAX_SHARD
) -> Plan:
    """Make the model of a checkpoint dense again, as `merge_` does.

    Args:
        checkpoint: From `convert`, or a folder from `pufferfish.save` or `save_pretrained` of a low-rank model.
        out: New file or folder of the same kind. The `from_pretrained` of transformers loads a Hugging Face folder.
        plan: The one that `convert` has written; by default it is read from the folder, or from next to the file.
        max_shard: Largest size of a weight file in a folder, in bytes; larger weights are split into several files.
    """
    if plan is not None:
        check_is_plan(plan, "merge")
    return _run(Path(checkpoint), Path(out), plan, max_shard, back=True)


def plan_file(out: Path) -> Path:
    """Path to which `convert` writes the plan of a converted file."""
    return out.with_name(f"{out.name}.plan.json")


def _run(checkpoint: Path, out: Path, plan: Plan | None, max_shard: int, back: bool) -> Plan:
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint}: no such file or folder")
    if out.exists():
        raise ValueError(f"{out}: it already exists; choose another name or remove it")
    if checkpoint.is_dir():
        with _naming(checkpoint):
            return _folder(checkpoint, out, plan, max_shard, back)
    plan = _check_resolved(plan or _plan_beside(checkpoint), back)
    with _naming(checkpoint), open_file(checkpoint) as loaded:
        if isinstance(loaded, Source):
            plan, tensors = _lazy_tensors(loaded, plan, back)
            with new_file(out) as fresh:
                write_safetensors(fresh, tensors)
        else:
            plan, data = _torch_data(checkpoint, loaded, plan, back)
            with new_file(out) as fresh:
                _torch_save(data, fresh)
    if not back:
        plan.save(plan_file(out))
    return plan


@contextlib.contextmanager
def _naming(checkpoint: Path) -> Iterator[None]:
    """Add the checkpoint to an error that names only a layer or a tensor of it."""
    try:
        yield
    except ValueError as error:
        if str(checkpoint) in str(error):
            raise
        raise ValueError(f"{checkpoint}: {error}") from None


def _plan_beside(checkpoint: Path) -> Plan:
    beside = plan_file(checkpoint)
    if not beside.is_file():
        raise ValueError(
            f"{checkpoint}: its plan {beside.name} is missing; pass a plan, or a checkpoint that has one"
        )
    return Plan.load(beside)


def _check_resolved(plan: Plan, back: bool) -> Plan:
    if back and not plan.resolved:
        raise ValueError("the plan has rules instead of ranks; pass the plan that convert has written")
    return plan


def _lazy_tensors(source: Source, plan: Plan, back: bool) -> tuple[Plan, list[LazyTensor]]:
    if back:
        return plan, merged(source, plan)
    plan = resolve(source, plan)
    return plan, factorized(source, plan)


def _folder(folder: Path, out: Path, plan: Plan | None, max_shard: int, back: bool) -> Plan:
    """Convert the weights of a Hugging Face folder, or of one that `save` has written, and copy its other files."""
    plan, weights = _plan_and_weights(folder, plan, back)
    hub = (folder / "config.json").is_file()
    model = _meta_model(folder) if hub else None
    with open_weights(weights) as source:
        if model is not None and not back:
            from .checkpoint_names import in_model_names  # imports transformers

            source = in_model_names(source, model)
        plan, tensors = _lazy_tensors(source, plan, back)
        written = tensors
        if model is not None and back:
            from .checkpoint_names import in_file_names

            written = in_file_names(tensors, model)
        with new_folder(out) as fresh:
            files = write_weights(fresh, LOW_RANK if hub and not back else "model", written, max_shard)
            _copy_other_files(folder, fresh)
            if (folder / _OPTIMIZER).is_file():  # written by the Trainer of transformers
                with contextlib.ExitStack() as stack:
                    saved = stack.enter_context(open_file(folder / _OPTIMIZER))
                    if back:
                        dense, factors = Source.of_lazy(tensors), source
                    else:
                        dense, factors = source, stack.enter_context(open_weights(fresh / files[-1]))
                    _torch_save(
                        convert_optimizers([saved], dense, factors, plan, back=back)[0], fresh / _OPTIMIZER
                    )
            if back:
                _forget_switch(fresh / _TRAINER)
                remove_notice(fresh)
            else:
                write_manifest(fresh, plan, files)
                if hub:
                    add_notice(fresh, plan)
    return plan


def _plan_and_weights(folder: Path, plan: Plan | None, back: bool) -> tuple[Plan, Path]:
    """The plan of a folder, unless one is given, and the file of its weights or their index."""
    low_rank = (folder / MANIFEST).is_file()
    if plan is not None and not low_rank:
        return _check_resolved(plan, back), dense_weights(folder)
    if not low_rank and (folder / _TRAINING).is_file():
        raise ValueError(
            f"{folder}: this is a training checkpoint; resume it with pf.Checkpoint, then call pf.merge_"
        )
    saved, weights = read_manifest(folder)
    if saved.ranks and not back:
        raise ValueError(f"{folder}: it is low-rank already; make it dense by `pufferfish merge` first")
    return _check_resolved(plan or saved, back), weights


def dense_weights(folder: Path) -> Path:
    """The file of a folder's weights, or their index."""
    for name in DENSE_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder}: it has none of {', '.join(DENSE_FILES)}")


def _meta_model(folder: Path) -> Any:
    """The model that transformers builds from the folder, on the meta device; None if that is not possible."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from .checkpoint_names import meta_model

    return meta_model(folder)


def _copy_other_files(folder: Path, fresh: Path) -> None:
    """Copy configuration, tokenizer and all other files that hold no weights."""
    skipped = (*_WEIGHT_FILES, MANIFEST, _OPTIMIZER)
    for item in folder.iterdir():
        if item.is_dir() and item.name == _TEMPLATES:
            shutil.copytree(item, fresh / item.name, copy_function=shutil.copyfile)
        elif item.is_file() and not any(fnmatch.fnmatch(item.name, pattern) for pattern in skipped):
            shutil.copyfile(item, fresh / item.name)  # with the umask, and writable


def _forget_switch(file: Path) -> None:
    """Remove the state of the switch from what the Trainer of transformers saved: the weights are dense now."""
    state = read_json(file) if file.is_file() else {}
    if (state.get("stateful_callbacks") or {}).pop("pufferfish", None) is not None:
        write_text(file, json.dumps(state, indent=2, sort_keys=True) + "\n")  # as the Trainer writes it


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
        converted = {m.name: m.make() for m in track(lazy, "converting weights")}
        others = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if place is None:
            return plan, {**converted, **others}
        found = found or (tensors, converted)
        data = {**data, place: {**converted, **others}}
    if found is None:
        raise ValueError(f"{path}: {problem}")
    dense, low_rank = reversed(found) if back else found
    states = {key: dict(value) for key, value in data.items() if _is_optimizer(value)}
    now = convert_optimizers([*states.values()], Source.of(dense), Source.of(low_rank), plan, back=back)
    return plan, {**data, **dict(zip(states, now, strict=True))}


def _torch_save(data: Any, path: Path) -> None:
    with errors_name(path), path.open("wb") as file:
        torch.save(data, file)  # opening the path itself, torch reports a full disk as a RuntimeError


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(x, Tensor) for x in value.values())


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def convert_optimizers(
    saved: list[Saved], dense: Source, low_rank: Source, plan: Plan, *, back: bool = False
) -> list[Saved]:
    """Convert the `state_dict()` of a model's optimizers from a dense to a low-rank model, or back.

    They number the parameters. Their names are known if an optimizer was built with `named_parameters()`; otherwise
    the numbers must follow the order of the model's parameters.

    Args:
        saved: the state dicts of all optimizers before the conversion.
        dense: state dict of the dense model.
        low_rank: state dict of the low-rank model.
        plan: with all ranks.
        back: convert from low-rank to dense.
    """
    if not saved:
        return []
    factor_map = plan.factor_map
    dense_params, low_rank_params = _stand_ins(dense, low_rank, plan)
    before, after = (low_rank_params, dense_params) if back else (dense_params, low_rank_params)
    optimizers = [_optimizer(one, before) for one in saved]
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if len(saved) > 1 and len(set(held)) < len(held):  # copies of one, such as the last and the best state
        return [convert_optimizers([one], dense, low_rank, plan, back=back)[0] for one in saved]
    carrier, factors = Carrier(optimizers, before.values()), _Factors(low_rank)
    for name, targets in factor_map.replaced.items():
        low = {target: low_rank_params[target] for target in targets}
        if back:
            carrier.join(factor_map, name, low, dense_params[name], factors)
            continue
        for target in targets:
            check_accepted(target, low[target], [dense_params[name]], optimizers)
        carrier.split(factor_map, name, dense_params[name], low, factors)
    carrier.commit(ExitStack(), after)
    return [_state_dict(one, was) for one, was in zip(optimizers, saved, strict=True)]


class _Factors(dict[str, Tensor]):
    """Whole factors by name, read when they are needed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.key_of = {own: key for key, own in own_keys(source.shapes).items()}

    def __missing__(self, name: str) -> Tensor:
        return self.source.get(self.key_of[name])


def _stand_ins(
    dense: Source, low_rank: Source, plan: Plan
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters without values of both models, in their order. One that is not replaced is the same object in both."""
    dense_params = _on_meta(dense, list(plan.parameters))
    low_rank_params = _on_meta(low_rank, low_rank_names(plan))
    targets_of = plan.factor_map.targets
    for name, parameter in dense_params.items():
        targets = targets_of.get(name, (name,))
        if len(targets) == 1:
            low_rank_params[targets[0]] = parameter
    return dense_params, low_rank_params


def _on_meta(source: Source, names: list[str]) -> dict[str, nn.Parameter]:
    shapes = {own: source.shapes[key][0] for key, own in own_keys(source.shapes).items()}
    return {name: nn.Parameter(torch.empty(shapes[name], device="meta")) for name in names if name in shapes}


def _optimizer(saved: Saved, params: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """An optimizer with the groups and the state that were saved."""
    names = _names_by_number(saved, {name: p.shape for name, p in params.items()})
    others = {name: nn.Parameter(torch.empty(0)) for name in names.values() if name not in params}
    held = {i: {**params, **others}[name] for i, name in names.items()}
    groups = saved["param_groups"]
    kind: Any = optim.Muon if any("ns_steps" in group for group in groups) else optim.SGD
    optimizer: optim.Optimizer = kind([nn.Parameter(torch.empty(1, 1))])
    optimizer.param_groups = [{**group, "params": [held[i] for i in group["params"]]} for group in groups]
    optimizer.state.update({held[i]: state for i, state in saved["state"].items()})
    return optimizer


def _state_dict(optimizer: optim.Optimizer, saved: Saved) -> Saved:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    number = {id(p): i for i, p in enumerate(held)}
    groups = [
        {**group, "params": [number[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    state = {number[id(p)]: optimizer.state[p] for p in held if p in optimizer.state}
    return {**saved, "state": state, "param_groups": groups}


def low_rank_names(plan: Plan) -> list[str]:
    """Names of the low-rank model's parameters, in its order.

    A module lists its own parameters before those of its children, so inside a layer names without a dot come first,
    then the others child by child.
    """
    targets, layers = plan.factor_map.targets, plan.ranks.keys()
    names: list[str] = []
    for layer, own in itertools.groupby(
        plan.parameters, lambda name: next((x for x in layers if not x or name.startswith(f"{x}.")), None)
    ):
        new = [target for name in own for target in targets.get(name, (name,))]
        if layer is not None:
            short = len(layer) + 1 if layer else 0
            children = list(dict.fromkeys(n[short:].split(".")[0] for n in new if "." in n[short:]))
            new.sort(key=lambda n: 1 + children.index(n[short:].split(".")[0]) if "." in n[short:] else 0)
        names += new
    return names


def _names_by_number(saved: dict[str, Any], shapes: Mapping[str, torch.Size]) -> dict[int, str]:
    """Names of the parameters by number. `shapes` are those of the model's parameters, in their order.

    If the groups have no names, each group is assumed to follow the model's order. Then the next parameter of the
    model must be, by its shape, the next one of exactly one group.
    """
    names = [own_name(n) for group in saved["param_groups"] for n in group.get("param_names", ())]
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    if len(names) == len(numbers):
        return dict(zip(numbers, names, strict=True))
    remaining = [list(group["params"]) for group in saved["param_groups"]]
    matched: dict[int, str] = {}
    for name, shape in shapes.items():
        fitting = [
            group for group in remaining if group and _shape_of(saved["state"].get(group[0])) in (None, shape)
        ]
        if len(fitting) == 1:
            matched[fitting[0].pop(0)] = name
    if len(matched) != len(numbers) or len(matched) != len(shapes):
        raise ValueError(
            "the optimizer state cannot be matched to the parameters: its groups have no names and do not follow the "
            "order of the model's parameters; build the optimizer with model.named_parameters(), or remove its state"
        )
    return matched


def _shape_of(state: State | None) -> torch.Size | None:
    values = (state or {}).values()
    return next((v.shape for v in values if isinstance(v, Tensor) and v.dim()), None)
