"""`Anchor`: the last model that all workers shared, updated by the outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..compression import Settings
from ..layers.matrix import at_least_fp32
from ..optim.by_name import check_optimizer, group_names, load_optimizer, optimizer_state

#: Creates the outer optimizer for the given parameters.
Outer = Callable[[list[nn.Parameter]], optim.Optimizer]


class Anchor:
    """Parameters and averaged buffers of the last shared model, in fp32 or wider, and their outer optimizer.

    Of sharded parameters it has the shard of this worker.

    Args:
        make_outer: creates the outer optimizer.
        params: parameters of the model, by name.
        settings: compression of the averages.
        before: the anchor so far. State of the outer optimizer is kept for parameters of the same shape.
    """

    def __init__(
        self,
        make_outer: Outer,
        params: Mapping[str, Tensor],
        settings: Settings,
        before: Anchor | None = None,
    ) -> None:
        old: Mapping[str, nn.Parameter] = before.params if before else {}
        self.params: dict[str, nn.Parameter] = {
            name: _anchor_for(old.get(name), x) for name, x in params.items()
        }
        self.buffers: dict[str, Tensor] = {}
        self.outer = make_outer(list(self.params.values()))
        self._before = before
        self._check_outer(settings)

    def _check_outer(self, settings: Settings) -> None:
        outer, kind = self.outer, type(self.outer).__name__
        groups = group_names(outer, self._names())
        for name in self.params.keys() - {name for group in groups for name in group}:
            raise ValueError(f"LocalSteps: the outer {kind} does not have {name}; pass it all parameters")
        for one in settings.by_pattern.values():
            if one.has_momentum and any(g.get("momentum") or "betas" in g for g in outer.param_groups):
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} and the outer {kind} both have momentum; use it in one of them"
                )

    def check_outer_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a saved state of the outer optimizer does not fit."""
        check_optimizer(state, type(self.outer).__name__, group_names(self.outer, self._names()))

    def fill(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device) -> None:
        """Set the values, and continue with the outer optimizer of the anchor before, if there is one."""
        for name, a in self.params.items():
            a.copy_(params[name])
        self.buffers = {name: at_least_fp32(b.detach()).to(device, copy=True) for name, b in buffers.items()}
        if self._before is not None:
            self.outer = _with_params_of(self._before.outer, self.outer)
            self._before = None

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {**self.params, **self.buffers}

    def differences(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return anchor − x of the named tensors, without the rounding error that a copy of the anchor starts with."""
        found = {}
        anchor = self.tensors()
        for name in names:
            a, x = anchor[name], tensors[name]
            found[name] = a.to(x.dtype).to(a.dtype) - x.to(a.device)
        return found

    def step(self, means: Mapping[str, Tensor]) -> None:
        """Update the parameters in `means` by the outer optimizer, and buffers to the mean."""
        for name, mean in means.items():
            if name in self.buffers:
                self.buffers[name].sub_(mean)
            else:
                self.params[name].grad = mean
        self.outer.step()
        self.outer.zero_grad()

    def copy_to(self, names: Iterable[str], tensors: Mapping[str, Tensor], mixing: float = 0.0) -> None:
        """Set the named tensors to mixing · (their values) + (1 − mixing) · anchor."""
        anchor = self.tensors()
        for name in names:
            x, a = tensors[name], anchor[name]
            x.copy_(torch.lerp(a, x.to(a), mixing) if mixing else a)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by name."""
        return {
            "anchor": {name: a.detach() for name, a in self.params.items()},
            "buffers": dict(self.buffers),
            "outer": optimizer_state(self.outer, self._names()),
        }

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Load a saved state of the outer optimizer."""
        load_optimizer(self.outer, self._names(), state)

    def _names(self) -> dict[int, str]:
        return {id(a): name for name, a in self.params.items()}


def _with_params_of(outer: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    """Return `outer`, which a scheduler may refer to, with the parameters of `new`."""
    for group, other in zip(outer.param_groups, new.param_groups, strict=True):
        group["params"] = other["params"]
    present = {p for group in outer.param_groups for p in group["params"]}
    for p in outer.state.keys() - present:
        del outer.state[p]
    return outer


def _anchor_for(anchor: nn.Parameter | None, x: Tensor) -> nn.Parameter:
    """Return the anchor of a parameter: the present one, to which outer optimizer state belongs, or a new one."""
    wide = at_least_fp32(x.detach())
    if anchor is not None and (anchor.shape, anchor.dtype, anchor.device) == (x.shape, wide.dtype, x.device):
        return anchor
    return nn.Parameter(wide.clone())
