"""`private_copy`: a copy of a model whose run has no effects outside of it."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..layers.base import CALL_HOOKS, HOOKS, kept_as_they_are

#: Every model has modules of these packages, so their hooks need not belong to the model.
_COMMON = {"torch", __name__.partition(".")[0]}


def private_copy(model: nn.Module, copy_tensor: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Copy a model with the hooks that it needs, and without the user's, which may have side effects.

    Args:
        copy_tensor: Copies the model's tensors. By default they are cloned.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> _ = layer.register_forward_hook(lambda *args: print("called"))
    >>> private_copy(layer)(torch.zeros(1, 4)).shape
    torch.Size([1, 2])
    """
    memo = kept_as_they_are(model)
    for module in model.modules():
        memo |= {id(getattr(module, name)): OrderedDict() for name in HOOKS}
        for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                if copy_tensor is not None:
                    memo[id(value)] = copy_tensor(value)
                elif not value.is_leaf:  # computed again in forward (weight_norm); deepcopy raises for it
                    memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(model, memo)
    packages = {_package(type(module)) for module in model.modules()} - _COMMON
    for module in model.modules():
        hooks = [
            (name, *item) for name in HOOKS if name in CALL_HOOKS for item in getattr(module, name).items()
        ]
        needed = {key for _, key, hook in hooks if _is_needed(hook, memo, packages)}
        for name, key, value in hooks:  # a hook's flags have the same key
            if key in needed:
                getattr(memo[id(module)], name)[key] = copy.deepcopy(value, memo)
    return copied


def _is_needed(hook: Any, memo: dict[int, Any], packages: set[str]) -> bool:
    """Whether a model without this hook would compute something else, as far as can be told.

    Hooks of the model's own code are needed: methods of its modules, which are bound to the copies, and
    functions of the library that defines its modules. Such a library may have stored that its hooks are in
    place, and would not install them again in the copy. Code that is not installed is the user's.
    """
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, nn.Module):
        return id(owner) in memo
    name = str(getattr(hook, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return name.startswith("torch.nn.") or (installed and _package(hook) in packages)


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def to_meta(tensor: Tensor) -> Tensor:
    """Copy a parameter, buffer or other tensor to the meta device."""
    if is_lazy(tensor):
        return cast(Tensor, cast(Any, type(tensor))(tensor.requires_grad, device="meta", dtype=tensor.dtype))
    copied = tensor.detach().to("meta", copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
