"""Optimizers of a run: `build_optimizer` for a recipe, and LARS, LAMB and SAM for large batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import ParamsT

from ...lowrank.muon import Muon, muon_parameters
from ..tasks import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer | OptimizerList:
    """Build the recipe's optimizer; "muon" is Muon and AdamW, as `muon_parameters` divides the model.

    On a GPU, SGD, Adam and AdamW are fused.

    >>> [group["weight_decay"] for group in build_optimizer(nn.Linear(2, 2), Recipe(epochs=1, batch=1, lr=1.0, weight_decay=0.1)).param_groups]
    [0.1, 0.0]
    """
    rest = list(model.parameters())
    if recipe.optimizer == "muon":
        in_blocks, rest = muon_parameters(model)
        if not in_blocks:
            raise ValueError(
                "optimizer muon: the model has no matrices in repeated blocks (ModuleList, Sequential); use adamw"
            )
    matrices = [p for p in rest if p.dim() > 1]
    vectors = [p for p in rest if p.dim() < 2]
    vector_decay = recipe.weight_decay if recipe.decay_vectors else 0.0
    decays = ((matrices, recipe.weight_decay), (vectors, vector_decay))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    on_gpu = any(p.is_cuda for p in model.parameters())
    fused: dict[str, Any] = {"fused": True} if on_gpu else {}
    sgd: dict[str, Any] = {"lr": recipe.lr, "momentum": recipe.momentum, "nesterov": recipe.nesterov}
    if recipe.optimizer in ("sgd", "sam"):
        sam = recipe.optimizer == "sam"
        optimizer = (
            SAM(groups, rho=recipe.rho, **sgd, **fused) if sam else torch.optim.SGD(groups, **sgd, **fused)
        )
        optimizer.register_step_pre_hook(_match_gradient_strides)
        return optimizer
    if recipe.optimizer == "lars":
        return LARS(groups, **sgd, trust=recipe.trust)
    if recipe.optimizer == "lamb":
        return LAMB(groups, recipe.lr, betas=recipe.betas)
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    adam = kind(groups, lr=recipe.lr, betas=recipe.betas, **fused)
    adam.register_step_pre_hook(_match_gradient_strides)
    if recipe.optimizer != "muon":
        return adam
    muon = Muon(in_blocks, recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    return OptimizerList([muon, adam])


def _match_gradient_strides(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give gradients their parameters' strides, also in dimensions of size 1; fused optimizers require it."""
    for p in (p for group in optimizer.param_groups if group.get("fused") for p in group["params"]):
        if p.grad is None or p.grad.stride() == p.stride():
            continue
        dimensions = zip(p.shape, p.stride(), p.grad.stride(), strict=True)
        if all(a == b for size, a, b in dimensions if size > 1):
            p.grad = p.grad.as_strided(p.shape, p.stride())
        else:
            p.grad = torch.empty_like(p).copy_(p.grad)


class OptimizerList(list[optim.Optimizer]):
    """Optimizers that step together. The library takes it as what it is, a list of optimizers.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> pair = OptimizerList([optim.Muon([layer.weight], lr=0.1), optim.AdamW([layer.bias], lr=0.1)])
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> pair.step()
    >>> len(pair.param_groups), [list(state) for state in pair.state.values()]
    (2, [['momentum_buffer'], ['step', 'exp_avg', 'exp_avg_sq']])
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The state of all parameters."""
        return {p: state for optimizer in self for p, state in optimizer.state.items()}

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for optimizer in self:
            optimizer.zero_grad()


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that scale the update of each matrix or filter; vectors have no weight decay and ratio 1."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for scaled in (True, False):
                params = [p for p in group["params"] if p.grad is not None and (p.dim() > 1) == scaled]
                if params:
                    self._update(group, params, [p.grad for p in params], scaled)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        """Update some parameters of a group; if `scaled`, with weight decay and the trust ratio."""
        raise NotImplementedError


def trust_ratios(
    weights: list[Tensor], updates: list[Tensor], trust: float = 1.0, decay: float = 0.0
) -> list[Tensor]:
    """Return η‖w‖ / (‖u‖ + λ‖w‖) for every pair, on its device; 1 where one of the norms is 0.

    >>> w, u = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    >>> trust_ratios([w, w], [u, torch.zeros(2)])
    [tensor(2.5000), tensor(1.)]
    """
    w, u = (torch.stack(torch._foreach_norm(x)) for x in (weights, updates))
    ratios = trust * w / (u + decay * w)
    return list(torch.where((w > 0) & (u > 0), ratios, 1.0).unbind())


class LARS(LayerwiseOptimizer, optim.SGD):  # type: ignore[misc]  # step takes no closure
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017).

    g ← η‖w‖/(‖g‖ + λ‖w‖) · (g + λw), then momentum and the step of SGD. As in torch's SGD, the learning rate is not part
    of the momentum, so that a schedule acts at once.

    Args:
        lr: usually 5 to 30 for large batches, since `trust` is small.
        trust: η.

    A layer whose weights or gradient are all 0 has ratio 1.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LARS(layer.parameters(), lr=10.0, weight_decay=1e-4, nesterov=True)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> before = layer.weight.detach().clone()
    >>> optimizer.step()
    >>> moved = (layer.weight - before).norm() / before.norm()
    >>> f"{moved:.3f}"  # 10 · 0.001, and 0.9 times that for Nesterov momentum
    '0.019'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov)
        self.defaults["trust"] = trust

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        if scaled:
            ratios = trust_ratios(params, grads, self.defaults["trust"], decay)
            grads = list(torch._foreach_add(grads, params, alpha=decay))
            torch._foreach_mul_(grads, ratios)
        if momentum:
            buffers = [self._buffer(p) for p in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads)
            nesterov = group["nesterov"]
            grads = list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers
        torch._foreach_sub_(params, torch._foreach_mul(grads, group["lr"]))

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


class LAMB(LayerwiseOptimizer, optim.AdamW):  # type: ignore[misc]  # step takes no closure
    """Layer-wise adaptive moments (You et al. 2020): r = m̂/(√v̂ + ε) + λw, then w ← w − lr · ‖w‖/‖r‖ · r.

    Args:
        lr: change of the weights in a step, relative to their norm.

    A layer whose weights or update are all 0 has ratio 1.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LAMB(layer.parameters(), lr=0.01)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> before = layer.weight.detach().clone()
    >>> optimizer.step()
    >>> f"{(layer.weight - before).norm() / before.norm():.3f}"
    '0.010'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scaled: bool) -> None:
        states = [self._state(p) for p in params]
        means, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        done = torch.stack(steps).double()  # 1 − 0.999 has only four digits in fp32
        first, second = ((1 - beta**done).tolist() for beta in group["betas"])
        denominators = torch._foreach_div(squares, second)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(means, first))
        torch._foreach_div_(updates, denominators)
        if scaled:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, trust_ratios(params, updates))
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(params, updates)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return state


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
