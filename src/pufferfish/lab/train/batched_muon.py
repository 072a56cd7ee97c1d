"""`BatchedMuon`: Muon that updates matrices of equal shape together, also in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim


class BatchedMuon(optim.Muon):
    """`torch.optim.Muon` with one product for all matrices of equal shape, and a learning rate that may be on the device.

    torch's Muon takes each matrix on its own, and no CUDA graph can capture it: it reads the learning rate on the host.

    >>> layer = torch.nn.Linear(4, 4, bias=False)
    >>> optimizer = BatchedMuon(layer.parameters(), lr=torch.tensor(0.1), weight_decay=0.0)
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.eye(4)).sum().backward()
    >>> optimizer.step()
    >>> torch.linalg.matrix_rank(before - layer.weight, atol=0.05).item()  # the gradient has rank 1
    1
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            batches: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    batches.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for params in batches.values():
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        directions = torch._foreach_lerp(grads, means, group["momentum"]) if group["nesterov"] else means
        O = orthogonalize(
            torch.stack(list(directions)), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        m, n = params[0].shape
        ratio = 0.2 * max(m, n) ** 0.5 if group["adjust_lr_fn"] == "match_rms_adamw" else max(1, m / n) ** 0.5
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(params, list((O.to(params[0].dtype) * (group["lr"] * ratio)).unbind()))


def orthogonalize(G: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton–Schulz iteration of Muon on a stack of matrices (k, m, n), in bf16: all singular values come near 1."""
    a, b, c = coefficients
    X = G.bfloat16()
    X = X.mT if G.shape[1] > G.shape[2] else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if G.shape[1] > G.shape[2] else X
