"""Names of weights in a Hugging Face folder and in the model that transformers builds from it.

They differ for many models: files have one tensor for each expert and the model one for all, modules were renamed, or
the files lack the prefix of the base model. Plans and low-rank folders have the names of the model. The rules are those
of transformers; here they are applied to one tensor after the other, so that the weights need not fit into memory.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ..lowrank.state_dict import LazyTensor, Source, together
from ..planning import read_json
from .pretrained import build_on_meta, find_class

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
        rename_source_key,
    )
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} cannot convert the names of a folder's weights; install 5.22 or later"
    ) from error


def meta_model(folder: Path) -> PreTrainedModel | None:
    """Model of a Hugging Face folder on the meta device; None if config.json names none of transformers' own classes."""
    found = find_class(read_json(folder / "config.json").get("architectures"))
    if found is None:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{folder}: its weights are quantized; pass a folder with unquantized weights")
    model = build_on_meta(found, config)
    return model.to(config.dtype) if isinstance(config.dtype, torch.dtype) else model


def in_model_names(source: Source, model: PreTrainedModel) -> Source:
    """The weights of the files under the model's names. Tensors that the model does not have are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, _Group] = {}
    for key in sorted(source.shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = key, None
        if name in expected:
            group = groups.setdefault(name, _Group(model, name, _matching(converters, pattern)))
            group.parts.append((pattern or key, key))
    return Source.of_lazy(tensor for group in groups.values() for tensor in together(group.convert, source))


def in_file_names(tensors: list[LazyTensor], model: PreTrainedModel) -> list[LazyTensor]:
    """The weights of a model under the names of files that `from_pretrained` reads, as `save_pretrained` writes them."""
    # Backwards, without the names of old versions and without prefixes, as in transformers' revert_weight_conversion.
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    transforms = [t.reverse_transform() for t in reversed(mapping) if not isinstance(t, PrefixChange)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    source = Source.of_lazy(tensors)
    groups: dict[str, _Group] = {}
    for key in sorted(source.shapes, key=dot_natural_key):
        name, pattern = apply_converters(key, converters)
        if pattern is None:
            name = apply_renamings(key, renamings)
        group = groups.setdefault(name, _Group(model, name, _matching(converters, pattern), renamings))
        group.parts.append((pattern or key, key))
    return [tensor for group in groups.values() for tensor in together(group.convert, source)]


@dataclass
class _Group:
    """Tensors that become one or several others together. Without a converter a single one is renamed."""

    model: PreTrainedModel
    name: str
    converter: WeightConverter | None
    renamings: list[WeightRenaming] = field(default_factory=list)  # of the tensors that the converter makes
    parts: list[tuple[str, str]] = field(default_factory=list)  # matching pattern of the converter, and key

    def convert(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.name: get(self.parts[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.parts:
            converter.add_tensor(self.name, key, pattern, get(key))
        converted = converter.convert(self.name, model=self.model, config=self.model.config)
        return {
            apply_renamings(name, self.renamings): x[0] if isinstance(x, list) else x
            for name, x in converted.items()
        }


def _matching(converters: list[WeightConverter], pattern: str | None) -> WeightConverter | None:
    return next((c for c in converters if pattern in c.source_patterns), None)
