"""SAM: sharpness-aware minimization around any optimizer."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _NormBase


class SAM(optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021): `optimizer` updates w with the gradient at w + ρ g/‖g‖.

        with sam.first_pass():
            loss().backward()  # g
        with sam.perturbed():
            loss().backward()
        sam.step()

    or `sam.step(closure)`, which calls `closure` twice. Under DDP, `first_pass` is `no_sync`: each worker perturbs its
    weights along the gradient of its own batch, as in the paper, and only gradients of the second pass are sent. Running
    statistics of normalization layers are updated in the first pass only.

    Groups, state, hooks and state_dict are those of `optimizer`: schedulers, `Checkpoint` and `Switch` accept either.

    Args:
        optimizer: updates the weights.
        model: wrapped by DDP or not.
        rho: ρ, norm of the perturbation.

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

    #: Makes a GradScaler set `grad_scale`, by which `step` detects it.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: optim.Optimizer, model: nn.Module, *, rho: float = 0.05) -> None:
        # All attributes of an Optimizer are those of the inner one, so super().__init__ is not called.
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"SAM: a {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if not rho > 0:
            raise ValueError(f"SAM: rho={rho} is not above 0; 0.05 is usual")
        self.optimizer = optimizer
        self.model = model
        self.rho = rho
        self._second = False  # whether the gradients are of the second pass

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # of a copy under construction
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def first_pass(self) -> contextlib.AbstractContextManager[Any]:
        """Context for the first forward and backward pass, in which no gradients are sent."""
        no_sync = getattr(self.model, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Perturb the weights along the gradients and clear these; the exact weights are restored on exit."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            raise ValueError("SAM: no parameter has a gradient; call backward() before perturbed()")
        norms = (m for m in self.model.modules() if isinstance(m, _NormBase))
        changed = params + [b for m in norms for b in m.buffers(recurse=False)]
        before = [x.detach().clone() for x in changed]
        self._perturb(params)
        self.zero_grad()
        try:
            yield
            self._second = True
        finally:
            with torch.no_grad():
                torch._foreach_copy_(changed, before)
            torch.clear_autocast_cache()

    @torch.no_grad()
    def _perturb(self, params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        scale = self.rho / (nn.utils.get_total_norm(grads) + 1e-12)
        torch._foreach_add_(params, torch._foreach_mul(grads, scale))
        torch.clear_autocast_cache()  # it may hold low-precision copies of the old weights

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights with the gradients of the second pass; a `closure` runs both passes first."""
        if "grad_scale" in vars(self):
            del self.grad_scale, self.found_inf
            raise ValueError("SAM does not support a GradScaler (fp16); train in bf16, which needs none")
        loss = None
        if closure is not None:
            self.zero_grad()
            with torch.enable_grad():
                with self.first_pass():
                    loss = closure()
                with self.perturbed():
                    closure()
        if not self._second:
            raise ValueError(
                "SAM: step() needs the gradients of a second pass; call "
                "`with sam.perturbed(): loss().backward()` before it"
            )
        self._second = False
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; SAM has none of its own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optimizer.load_state_dict(dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        return {key: vars(self)[key] for key in ("optimizer", "model", "rho", "_second")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
