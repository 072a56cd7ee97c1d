"""The model's own names, whatever it is wrapped in: the one place that knows wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.optim.swa_utils import AveragedModel

# Segments that wrappers put into names and nobody else uses: torch.compile, activation checkpointing, FSDP1.
_MARKERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def own_name(name: str) -> str:
    """A module's or tensor's name without what wrappers added.

    >>> own_name("_orig_mod.layer1._checkpoint_wrapped_module.0.conv1.weight")
    'layer1.0.conv1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _MARKERS)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, an AveragedModel and `torch.compile`.

    >>> unwrap(nn.DataParallel(nn.Linear(2, 3)))
    Linear(in_features=2, out_features=3, bias=True)
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | AveragedModel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(own name, name as `get_submodule` wants it, module) of every module that is not a wrapper."""
    for path, module in unwrap(model).named_modules():
        if not _MARKERS & module._modules.keys():
            yield own_name(path), path, module


def own_keys(names: Iterable[str]) -> dict[str, str]:
    """State-dict key → own name. A leading `module.` is DDP's when every key has it.

    >>> own_keys(["module.fc.weight", "module.fc.bias"])
    {'module.fc.weight': 'fc.weight', 'module.fc.bias': 'fc.bias'}
    """
    keys = {name: own_name(name) for name in names}
    if keys and all(own.startswith("module.") for own in keys.values()):
        return {name: own.removeprefix("module.") for name, own in keys.items()}
    return keys
