"""What optimizers have done and what they hold: the two things a switch must know about them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class UsedGradients:
    """Which gradients an update has used: loops that clear them late still hold them at the switch."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[int, int]] = {}  # parameter → the gradient of its last update
        self._handles: list[Any] = []

    def watch(self, optimizers: list[Optimizer]) -> None:
        if not self._handles:
            self._handles = [optimizer.register_step_post_hook(self._note) for optimizer in optimizers]

    def forget(self) -> None:
        self._used = {}
        while self._handles:
            self._handles.pop().remove()

    def refuse_pending(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None and self._used.get(id(p)) != _stamp(p.grad) and p.grad.any():
                raise ValueError(
                    f"{name}: a gradient is pending that no optimizer.step has used; switch between updates, or "
                    "call optimizer.zero_grad() first"
                )

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._used |= {id(p): _stamp(p.grad) for p in params if p.grad is not None}


def _stamp(gradient: Tensor) -> tuple[int, int]:
    """Changes whenever something is added to the gradient, or another takes its place."""
    gradient = getattr(gradient, "_local_tensor", gradient)
    return gradient.data_ptr(), gradient._version


def refuse_forgotten(replaced: Mapping[int, str], given: list[Optimizer]) -> None:
    """An optimizer that nobody passed along would go on updating weights that are no longer in the model.

    `replaced` names parameters by their id. Optimizers have no registry, so the collector is asked.
    """
    if not _forgotten(replaced, given):
        return
    gc.collect()  # one that nobody holds any more does not count
    for name, kind in _forgotten(replaced, given):
        raise ValueError(
            f"{name}: another optimizer ({kind}) holds this parameter and was not passed to the switch; pass all of them as a list"
        )


def _forgotten(replaced: Mapping[int, str], given: list[Optimizer]) -> list[tuple[str, str]]:
    """(parameter, type of optimizer) of every replaced parameter that another optimizer holds."""
    known = {id(optimizer.param_groups) for optimizer in given}
    kinds = _subclasses(Optimizer)
    # By type, not by isinstance: that asks objects for their class, and lazy ones would load what they stand for.
    others = [x for x in gc.get_objects() if type(x) in kinds]
    groups = [(x, getattr(x, "param_groups", ())) for x in others]
    held = [
        (p, type(x).__name__) for x, own in groups if id(own) not in known for g in own for p in g["params"]
    ]
    return [(replaced[id(p)], kind) for p, kind in held if id(p) in replaced]


def _subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_subclasses, children))
