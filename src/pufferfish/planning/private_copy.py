"""`private_copy`: a copy of a model whose run has no effects outside of it."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..layers.base import CALL_HOOKS, HOOKS, kept_as_they_are


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
    for module in model.modules():
        hooks = [
            (name, *item) for name in HOOKS if name in CALL_HOOKS for item in getattr(module, name).items()
        ]
        needed = {key for _, key, hook in hooks if _is_needed(hook, memo)}
        for name, key, value in hooks:  # a hook's flags have the same key
            if key in needed:
                getattr(memo[id(module)], name)[key] = copy.deepcopy(value, memo)
    return copied


def _is_needed(hook: Any, memo: dict[int, Any]) -> bool:
    """Whether a hook belongs to the model: a method of its modules, or a function of torch.nn or transformers.

    transformers stores in a model that its hooks are in place, and would not install them again in the copy.
    """
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, nn.Module):
        return id(owner) in memo
    return str(getattr(hook, "__module__", "")).startswith(("torch.nn.", "transformers."))
