"""Copies without tensors: hooks are left out, and flags with "hooks" in their names stay."""

from typing import Any

from torch import nn

import pufferfish as pf
from pufferfish.layers.base import HOOKS


class Flagged(nn.Module):
    """Has attributes that look like hooks by their names, as some libraries set them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.hooks_installed = self._output_hooks_installed = True
        self._my_hooks = None
        self.own_hooks = {"a": [1, 2]}
        self.layer._seen_hooks_ = True


def test_flags_named_like_hooks_stay() -> None:
    model = Flagged()
    for name in HOOKS:
        getattr(model.layer, name)[7] = print
    copied: Any = pf.layers.meta_copy(model)
    assert (copied.hooks_installed, copied._output_hooks_installed, copied._my_hooks) == (True, True, None)
    assert copied.own_hooks == {"a": [1, 2]}
    assert copied.own_hooks is not model.own_hooks
    assert copied.training is copied.layer.training is copied.layer._seen_hooks_ is True
    assert not any(getattr(module, name) for module in copied.modules() for name in HOOKS)
    assert all(getattr(model.layer, name) for name in HOOKS)
