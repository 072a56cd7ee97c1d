"""SAM: sharpness-aware minimization with SGD."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import ParamsT


class SAM(optim.SGD):
    """Sharpness-aware minimization (Foret et al. 2021): SGD that updates w with the gradient at w + ρ g/‖g‖.

        loss().backward()  # g
        with sam.perturbed(model):
            loss().backward()
        sam.step()

    Under DDP, run the first pass in `no_sync`: each worker perturbs its weights along the gradient of its own batch, as
    in the paper, and only gradients of the second pass are sent.

    Args:
        rho: ρ, norm of the perturbation.
        settings: of SGD.

    >>> model = nn.Linear(4, 1)
    >>> sam = SAM(model.parameters(), 0.1)
    >>> x, before = torch.randn(8, 4), model.weight.detach().clone()
    >>> model(x).square().mean().backward()
    >>> with sam.perturbed(model):
    ...     moved = (model.weight - before).norm() > 0
    ...     model(x).square().mean().backward()
    >>> bool(moved), torch.equal(model.weight, before)
    (True, True)
    >>> sam.step()
    """

    def __init__(self, params: ParamsT, lr: float, *, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        self.defaults["rho"] = rho

    @contextlib.contextmanager
    def perturbed(self, model: nn.Module) -> Iterator[None]:
        """Perturb the weights along the gradients and clear these; the exact weights are restored on exit.

        So are the running statistics of normalization layers of `model`, which only the first pass updates.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = (m for m in model.modules() if isinstance(m, _NormBase))
        changed = params + [b for m in norms for b in m.buffers(recurse=False)]
        before = [x.detach().clone() for x in changed]
        with torch.no_grad():
            grads = [p.grad for p in params if p.grad is not None]
            scale = self.defaults["rho"] / (nn.utils.get_total_norm(grads) + 1e-12)
            torch._foreach_add_(params, torch._foreach_mul(grads, scale))
        torch.clear_autocast_cache()  # it may hold low-precision copies of the weights
        self.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(changed, before)
            torch.clear_autocast_cache()
