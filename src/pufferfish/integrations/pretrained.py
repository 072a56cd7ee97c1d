"""Folders of low-rank transformers models: `save_pretrained` writes one, `from_pretrained` loads it.

The weights are in `pufferfish.safetensors` instead of `model.safetensors`, and the plan is in `pufferfish.json`. So the
`from_pretrained` of transformers does not find its file and raises, also where pufferfish is not installed. Under the
usual name it would initialize the factorized layers at random, and only log that.

`factorize_`, `reshape_` and `Switch` import this module for models with modules of transformers. It extends three methods of
transformers' classes, which stay the same for dense models and their folders, with one exception: the Trainer also reads
weights that its files have under other names than the model, such as experts.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ..layers import unwrap
from ..lowrank.factorize import plan_of, ranks_of, reshape_
from ..lowrank.files import LOW_RANK, MANIFEST, load, move_files, read_manifest, write_manifest
from ..lowrank.state_dict import index_name, open_weights
from ..planning import Plan, read_json, write_text
from .model_card import MODEL_CARD, add_notice

_REFUSED = {
    "push_to_hub": "save the folder, then upload it by huggingface_hub.upload_folder",
    "variant": "leave it out",
    "distributed_checkpoint": "leave it out; the weights are gathered",
}


def from_pretrained(
    folder: str | Path, model_class: type[Any] | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load a low-rank model from a folder that `save_pretrained` or `pufferfish convert` has written.

    The model is built on the meta device with its low-rank structure, and the weights are read one after the other.

    Args:
        folder: Local folder.
        model_class: Class of the saved model, if it is not one of transformers' own, or an Auto class such as
            `AutoModelForCausalLM`. The default is the one that config.json names.
        kwargs: For the `from_pretrained` of that class, such as `dtype` or `device_map`.

    Returns:
        The model in evaluation mode.

    >>> import pufferfish as pf, tempfile, torch
    >>> from transformers import OPTConfig, OPTForCausalLM
    >>> config = OPTConfig(vocab_size=64, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = OPTForCausalLM(config).eval()
    >>> _ = pf.factorize_(model, pf.plan(model, rank=0.25))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     same = from_pretrained(folder)
    >>> tokens = torch.arange(8)[None]
    >>> torch.equal(same(tokens).logits, model(tokens).logits)
    True
    """
    folder = Path(folder)
    plan, weights = read_manifest(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: config.json is missing; load the weights into a model by pufferfish.load"
        )
    architectures = read_json(folder / "config.json").get("architectures")
    cls: Any = model_class or find_class(architectures)
    if cls is None:
        raise ValueError(
            f"{folder}: its config.json names no class of transformers ({architectures}); pass model_class="
        )
    remote = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    if not issubclass(cls, PreTrainedModel):  # an Auto class, which has no models of its own
        config = kwargs.get("config") or AutoConfig.from_pretrained(folder, **remote)
        cls = type(build_on_meta(functools.partial(cls.from_config, **remote), config))
    config = kwargs.pop("config", None) or cls.config_class.from_pretrained(folder, **remote)
    with open_weights(weights) as source:
        # These are mapped into memory, and read when they are used.
        state = {name: source.get(name) for name in source.shapes}
        try:
            model, info = _with_structure(cls, plan).from_pretrained(
                None, config=config, state_dict=state, output_loading_info=True, **kwargs
            )
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    model.__class__ = cls
    for problem in ("missing_keys", "unexpected_keys"):
        if info[problem]:
            names = ", ".join(sorted(info[problem])[:3])
            raise ValueError(f"{folder}: {problem.replace('_', ' ')} {names}; it does not fit {cls.__name__}")
    model.config.name_or_path = model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and "generation_config" not in kwargs:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _with_structure(cls: type[PreTrainedModel], plan: Plan) -> type[PreTrainedModel]:
    """Subclass whose models are low-rank when they are built, and whose weights keep the names of the file."""

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        reshape_(self, plan)

    def fill(model: PreTrainedModel, state_dict: Any, files: Any, settings: Any, *args: Any) -> Any:
        # Rules that rename dense weights could match those of low-rank layers.
        settings = dataclasses.replace(settings, weight_mapping=[])
        return cls._load_pretrained_model(model, state_dict, files, settings, *args)

    members = {"__init__": build, "_load_pretrained_model": staticmethod(fill), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


def find_class(architectures: list[str] | None) -> type[PreTrainedModel] | None:
    """Class of transformers that a configuration names, or None if it is not one of transformers' own."""
    found = getattr(transformers, architectures[0], None) if architectures else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def build_on_meta(kind: Callable[[Any], PreTrainedModel], config: Any) -> PreTrainedModel:
    """Build a model without weights."""
    from transformers.initialization import meta_device_safe_creation_ops

    with torch.device("meta"), meta_device_safe_creation_ops():
        return kind(config)


def _save_low_rank(save: Any, model: PreTrainedModel, folder: Path, arguments: dict[str, Any]) -> None:
    """Write a low-rank folder: `save_pretrained` of transformers writes it aside, then the weights are renamed."""
    for name, advice in _REFUSED.items():
        if arguments.get(name):
            raise ValueError(f"save_pretrained: {name} cannot be used for a low-rank model; {advice}")
    arguments |= arguments.pop("kwargs", {}) | {"save_original_format": False}  # but the names of the model
    if not model.should_save_on_this_rank(arguments.get("is_main_process", True)):
        save(model, folder, **arguments)  # takes part in gathering
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(model)
    with tempfile.TemporaryDirectory(prefix=".pufferfish.", dir=folder) as name:
        aside = Path(name)
        save(model, aside, **arguments)
        write_manifest(aside, plan, _rename_weights(aside))
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / MODEL_CARD, aside / MODEL_CARD)
        add_notice(aside, plan)
        move_files(aside, folder)


def _plan(model: PreTrainedModel) -> Plan:
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return plan_of(model)
    # FSDP2 replaces the class by a subclass of it and FSDPModule.
    kinds = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return plan_of(model, build_on_meta(next(kinds), model.config))


def _rename_weights(folder: Path) -> list[str]:
    """Rename the weights that transformers wrote; returns their names, that of an index last."""
    index = folder / index_name("model")
    files = sorted(folder.glob("model*.safetensors"))
    names = [file.rename(file.with_name(LOW_RANK + file.name.removeprefix("model"))).name for file in files]
    if not index.is_file():
        return names
    data = read_json(index)
    where = {key: LOW_RANK + file.removeprefix("model") for key, file in data["weight_map"].items()}
    write_text(folder / index_name(LOW_RANK), json.dumps(data | {"weight_map": where}, indent=2) + "\n")
    index.unlink()
    return [*names, index_name(LOW_RANK)]


def _extend() -> None:
    """Extend the methods of transformers' classes."""
    save = PreTrainedModel.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # With adapters only these are saved.
        if not ranks_of(self) or getattr(self, "_hf_peft_config_loaded", False):
            return save(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        return _save_low_rank(save, self, Path(arguments.pop("save_directory")), arguments)

    PreTrainedModel.save_pretrained = save_pretrained
    with contextlib.suppress(ImportError):  # the Trainer needs accelerate
        from transformers import Trainer

        _extend_trainer(Trainer)


def _extend_trainer(trainer: Any) -> None:
    """Make the Trainer read the low-rank checkpoints that it has written, to resume and for the best model."""
    load_checkpoint, load_best = trainer._load_from_checkpoint, trainer._load_best_model

    @functools.wraps(load_checkpoint)
    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        folder, own = Path(resume_from_checkpoint), self.model if model is None else model
        if (folder / MANIFEST).is_file():
            _read_checkpoint(own, folder)
            return
        if _is_after_switch(folder):  # of a model that is not a PreTrainedModel
            _check_is_low_rank(own, folder)
        load_checkpoint(self, resume_from_checkpoint, model)
        _read_renamed(own, folder)

    @functools.wraps(load_best)
    def load_best_model(self: Any) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if (folder / MANIFEST).is_file():
            _read_checkpoint(self.model, folder)
        else:
            load_best(self)
            _read_renamed(self.model, folder)

    trainer._load_from_checkpoint = load_from_checkpoint
    trainer._load_best_model = load_best_model


def _read_renamed(model: Any, folder: Path) -> None:
    """Load the dense weights again if files and model have different names: the Trainer only logs those it does not find.

    Files of a mixture of experts, for example, have one tensor for each expert, and the model has one for all.
    """
    model = unwrap(model)
    files = [folder / name for name in ("model.safetensors", index_name("model"))]
    file = next((file for file in files if file.is_file()), None)
    if file is None or not isinstance(model, PreTrainedModel) or ranks_of(model):
        return
    with open_weights(file) as source:
        if source.shapes.keys() <= model.state_dict().keys():
            return
        from .checkpoint_names import in_model_names

        renamed = in_model_names(source, model)
        model.load_state_dict({name: renamed.get(name) for name in renamed.shapes}, strict=False)


def _is_after_switch(folder: Path) -> bool:
    """Whether the Trainer saved the folder while the model was low-rank."""
    file = folder / "trainer_state.json"
    callbacks = (read_json(file).get("stateful_callbacks") or {}) if file.is_file() else {}
    switch = callbacks.get("pufferfish")
    if switch is None or switch["switched"] is None or switch["merged"] is not None:
        return False
    return bool(Plan.from_json(switch["plan"]).ranks)


def _read_checkpoint(model: Any, folder: Path) -> None:
    _check_is_low_rank(model, folder)
    load(model, folder)


def _check_is_low_rank(model: Any, folder: Path) -> None:
    if not ranks_of(model):
        raise ValueError(
            f"{folder}: saved after the switch to low rank, but the model is dense; resume by pufferfish.integrations."
            "transformers.train(trainer, switch, resume_from_checkpoint=…) instead of trainer.train"
        )


_extend()
