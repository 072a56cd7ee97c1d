"""SAM: the gradient where the loss is highest nearby, for any optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _NormBase


class SAM(optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021): `optimizer` steps from w with the gradient at w + ρ g/‖g‖.

        with sam.alone():
            loss().backward()  # g
        with sam.perturbed():
            loss().backward()
        sam.step()

    or `sam.step(closure)`, which calls `closure` twice. Under DDP `alone` is `no_sync`: each worker climbs by the gradient
    of its own batch, as in the paper, and only the second pass is sent. Running statistics of normalisation layers see the
    first pass alone.

    Groups, state, hooks and state_dict are those of `optimizer`: schedulers, `Checkpoint` and `Switch` take either.

    Args:
        optimizer: what updates the weights.
        model: what is trained, wrapped by DDP or not.
        rho: ρ, how far to climb.

    >>> model = nn.Linear(4, 1)
    >>> sam = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> x, before = torch.randn(8, 4), model.weight.detach().clone()
    >>> model(x).square().mean().backward()
    >>> with sam.perturbed():
    ...     moved = (model.weight - before).norm() > 0
    ...     model(x).square().mean().backward()
    >>> bool(moved), torch.equal(model.weight, before)
    (True, True)
    >>> sam.step()
    """

    #: So that a GradScaler hands its scale over, and is noticed.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: optim.Optimizer, model: nn.Module, *, rho: float = 0.05) -> None:
        # All that an Optimizer keeps is the inner one's, so there is nothing to initialise here.
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"SAM: a {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if not rho > 0:
            raise ValueError(f"SAM: rho={rho} is not above 0; 0.05 is usual")
        self.optimizer = optimizer
        self.model = model
        self.rho = rho
        self._second = False  # whether the gradients are those of the second pass

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """For the first pass, forward and backward: nothing is sent."""
        no_sync = getattr(self.model, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Climb along the gradients and clear them; afterwards the weights are the old ones, bit for bit."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            raise ValueError("SAM: no parameter has a gradient; call backward() before perturbed()")
        norms = (m for m in self.model.modules() if isinstance(m, _NormBase))
        changed = params + [b for m in norms for b in m.buffers(recurse=False)]
        before = [x.detach().clone() for x in changed]
        self._climb(params)
        self.zero_grad()
        try:
            yield
            self._second = True
        finally:
            with torch.no_grad():
                torch._foreach_copy_(changed, before)
            torch.clear_autocast_cache()

    @torch.no_grad()
    def _climb(self, params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        scale = self.rho / (nn.utils.get_total_norm(grads) + 1e-12)
        torch._foreach_add_(params, torch._foreach_mul(grads, scale))
        torch.clear_autocast_cache()  # it may hold low-precision copies of the weights

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of the second pass; with a `closure`, both passes first."""
        if "grad_scale" in vars(self):
            del self.grad_scale, self.found_inf
            raise ValueError("SAM does not work with a GradScaler (fp16); train in bf16, which needs none")
        loss = None
        if closure is not None:
            self.zero_grad()
            with torch.enable_grad():
                with self.alone():
                    loss = closure()
                with self.perturbed():
                    closure()
        if not self._second:
            raise ValueError(
                "SAM: step() wants the gradients of a second pass: "
                "`with sam.perturbed(): loss().backward()` comes before it"
            )
        self._second = False
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's; SAM keeps nothing from step to step."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the inner optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        return {key: vars(self)[key] for key in ("optimizer", "model", "rho", "_second")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
