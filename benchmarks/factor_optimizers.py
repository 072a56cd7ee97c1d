"""Optimizers for two factors that `factor_rules.py` compares with Muon on each factor alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.optim.muon import orthogonalize

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315), 5, 1e-7


class ScaledMuon(pf.Muon):
    """Muon whose rate is a multiple of the schedule's."""

    rate = 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        group = self.param_groups[0]
        lr = group["lr"]
        group["lr"] = lr * self.rate
        super().step()
        group["lr"] = lr


class Factors(torch.optim.Optimizer):
    """Momentum as in Muon, and steps of the two factors W = U V that regard their product.

    Tangent: the steepest step of each factor for its size in the spectral norm of U V. With S² = V Vᵀ, U moves along
    orth(M_U S⁻¹) S⁻¹, and V alike. Otherwise, as in Spectron: Muon's steps, divided by ‖U‖₂ + ‖V‖₂ + 1.
    """

    def __init__(
        self,
        pairs: list[tuple[nn.Parameter, nn.Parameter]],
        *,
        tangent: bool,
        up: float,
        down: float,
        decay: float,
    ) -> None:
        super().__init__([p for pair in pairs for p in pair], {"lr": 0.0})
        self.tangent, self.up, self.down, self.decay = tangent, up, down, decay
        self.alike: dict[Any, list[tuple[nn.Parameter, nn.Parameter]]] = {}
        for U, V in pairs:
            self.alike.setdefault((U.shape, V.shape), []).append((U, V))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        lr = self.param_groups[0]["lr"]
        for pairs in self.alike.values():
            Us, Vs = zip(*pairs, strict=True)
            U, V = torch.stack(Us), torch.stack(Vs)
            M_U, M_V = self._directions(Us), self._directions(Vs)
            if self.tangent:
                S, T = inverse_root(V), inverse_root(U.mT)
                step_U, step_V = orth(M_U @ S) @ S, T @ orth(T @ M_V)
            else:
                bound = (norm2(U) + norm2(V) + 1).view(-1, 1, 1)
                step_U, step_V = orth(M_U) / bound, orth(M_V) / bound
            scale = 0.2 * max(U.shape[1], V.shape[2]) ** 0.5  # torch's match_rms_adamw, of the product
            for params, steps, rate in ((Us, step_U, self.up), (Vs, step_V, self.down)):
                torch._foreach_mul_(params, 1 - lr * self.decay)
                torch._foreach_sub_(params, list((steps * (lr * scale * rate)).unbind()))

    def _directions(self, params: tuple[nn.Parameter, ...]) -> Tensor:
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means, grads = [self.state[p]["momentum_buffer"] for p in params], [p.grad for p in params]
        torch._foreach_lerp_(means, grads, 0.05)
        return torch.stack(torch._foreach_lerp(grads, means, 0.95))


def orth(G: Tensor) -> Tensor:
    return orthogonalize(G, *NEWTON_SCHULZ).float()


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products of fp32 in fp32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@full_precision()  # TF32 loses the small eigenvalues of ill-conditioned matrices
def inverse_root(X: Tensor, steps: int = 16) -> Tensor:
    """(X Xᵀ)^-½ of a stack of matrices, by matrix products only (a CUDA graph captures no factorization)."""
    G = X @ X.mT
    eye = torch.eye(G.shape[1], device=G.device)
    G = G + 1e-3 * G.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1) * eye
    size = G.norm(dim=(1, 2), keepdim=True)
    Y, Z = G / size, eye.expand_as(G)
    for _ in range(steps):
        T = 1.5 * eye - 0.5 * Z @ Y
        Y, Z = Y @ T, T @ Z
    return Z / size.sqrt()


def norm2(X: Tensor, steps: int = 12) -> Tensor:
    """Largest singular values of a stack of matrices, by power iteration."""
    G = X.mT @ X if X.shape[1] > X.shape[2] else X @ X.mT
    v = torch.ones_like(G[:, :, :1])
    for _ in range(steps):
        v = G @ v
        v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-20)
    return (G @ v).norm(dim=(1, 2)).sqrt()
