"""Models, names and tensors without what wrappers (DDP, torch.compile, FSDP2 …) add."""

import fnmatch
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

# Name segments added by torch.compile, activation checkpointing and FSDP1.
_MARKERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Attribute of a model that `Switch.rebuild` has replaced: the new model.
REBUILT = "_pufferfish_rebuilt"


def own_name(*parts: str) -> str:
    """Join parts of the name of a module or tensor, without empty ones and without the segments that wrappers add.

    >>> own_name("", "layers.0._orig_mod", "weight")
    'layers.0.weight'
    """
    return ".".join(part for part in ".".join(parts).split(".") if part and part not in _MARKERS)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern (`fnmatch`) matches the name of a layer or tensor, or that of a module around it.

    >>> [matches("block.fc.weight", pattern) for pattern in ("block.fc.weight", "*.fc", "block", "fc")]
    [True, True, True, False]
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel, AveragedModel, `torch.compile` and Lightning Fabric's wrapper."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inner := inside(model)) is not None:
            model = inner
        else:
            return model


def inside(model: nn.Module) -> nn.Module | None:
    """The module in a wrapper that may itself contain DDP: `torch.compile`, an AveragedModel, Fabric's; None for others."""
    if isinstance(model, AveragedModel):
        return model.module
    fabric = "_original_module" in model._modules
    return model._modules.get("_forward_module" if fabric else "_orig_mod")


def rebuilt(model: nn.Module) -> nn.Module:
    """Return the model that `Switch.rebuild` has put in the place of `model`, or `model` itself."""
    new: nn.Module = vars(model).get(REBUILT, model)
    return new


def local_part(x: Tensor) -> Tensor:
    """Return what this worker holds of a tensor: its shard, or all of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def named_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (own name, path for `get_submodule`, module) of every module that is not a wrapper."""
    for path, module in unwrap(model).named_modules():
        if not _MARKERS & module._modules.keys():
            yield own_name(path), path, module


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by own name."""
    return {own_name(name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def own_keys(names: Iterable[str]) -> dict[str, str]:
    """Map state-dict keys to own names. A leading `module.` is removed if every key has it, as under DDP."""
    keys = {name: own_name(name) for name in names}
    if keys and all(own.startswith("module.") for own in keys.values()):
        return {name: own.removeprefix("module.") for name, own in keys.items()}
    return keys
