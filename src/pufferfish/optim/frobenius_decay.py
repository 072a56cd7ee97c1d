"""`FrobeniusDecay`: weight decay on the product of two factors instead of on each factor."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from ..layers import LowRank, Matrix
from ..layers.matrix import at_least_fp32
from ..layers.names import named_modules
from .carry import Optimizers, as_list, check_optimizers

#: Optimizers that add weight decay to the gradient, or subtract it from the weights if a flag in the group is set.
_COUPLED = (
    optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
#: Optimizers that always subtract it from the weights.
_DECOUPLED = (optim.Adafactor, optim.Muon)


class FrobeniusDecay:
    """Decay W = U V of every low-rank layer instead of U and V: λ·∇½‖UV‖² = (λ U V Vᵀ, λ Uᵀ U V).

    This is the effect of weight decay λ of the dense layer on the factors. It acts in each
    `optimizer.step`, after the all-reduce and after clipping, on the low-rank layers that the model has at
    that time, so it can be created before or after the switch. The factors' own weight decay is undone; all
    other parameters keep theirs. The groups do not change, so schedulers work as before.

    If the optimizer adds weight decay to the gradient (SGD, Adam …), so does this, at the loss scale of the
    gradients that a fused optimizer gets. If it subtracts weight decay from the weights (AdamW,
    `decoupled_weight_decay=True`, Muon, Adafactor), so does this: p ← p − lr·λ·(…). Factors without a
    gradient do not change.

    Args:
        model: Plain, DDP, compiled or sharded by FSDP2 (then the factors are gathered, one matrix at a time).
        optimizer: One or several. Both factors of a layer should be in the same one, because the decay of each
            factor is computed from the other.
        strength: λ.
        decoupled: Whether an optimizer that is not one of torch's subtracts weight decay from the weights.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=5e-4)
    >>> decay = FrobeniusDecay(model, optimizer, strength=5e-4)
    >>> _ = pf.factorize_(model, pf.plan(model, rank=0.25), optimizer)
    >>> model(torch.randn(8, 64)).sum().backward()
    >>> optimizer.step()
    >>> decay.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        strength: float = 1e-4,
        *,
        decoupled: bool | None = None,
    ) -> None:
        if not (math.isfinite(strength) and strength >= 0):
            raise ValueError(f"FrobeniusDecay: strength={strength} is not a finite number ≥ 0")
        optimizers = as_list(optimizer)
        check_optimizers(optimizers)
        parameters = {id(p) for p in model.parameters()}
        for one in optimizers:
            if decoupled is None and not isinstance(one, _COUPLED + _DECOUPLED):
                raise TypeError(
                    f"FrobeniusDecay: it is not known how {type(one).__name__} applies weight decay; pass "
                    "decoupled=False if it adds it to the gradient, decoupled=True if it subtracts it from the weights"
                )
        if not any(id(p) in parameters for one in optimizers for g in one.param_groups for p in g["params"]):
            raise ValueError(
                "FrobeniusDecay: no optimizer has a parameter of this model; pass the optimizer that trains it"
            )
        self.model = model
        self.strength = strength
        self.decoupled = decoupled
        self._handles = [one.register_step_pre_hook(self._before) for one in optimizers]

    def remove(self) -> None:
        """Remove the hooks. The factors have their own weight decay again."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._decay(optimizer)
            return None

        def with_decay() -> Any:  # the closure computes the gradients
            loss = closure()
            self._decay(optimizer)
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], with_decay, *args[2:]), rest

    @torch.no_grad()
    def _decay(self, optimizer: optim.Optimizer) -> None:
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
        for x, down, up in _factors(self.model):
            if id(down) in groups or id(up) in groups:
                gradients = _decay_gradients(x, down, up)  # both, before either factor changes
                for p, gradient in zip((down, up), gradients, strict=True):
                    if id(p) in groups:
                        self._apply(optimizer, groups[id(p)], p, gradient.mul_(self.strength))

    def _apply(self, optimizer: Any, group: dict[str, Any], p: Tensor, gradient: Tensor) -> None:
        own = group.get("weight_decay", 0.0)
        weight, gradient = _local(p), _local_part(gradient, p)
        decoupled = self.decoupled
        if decoupled is None:
            decoupled = isinstance(optimizer, _DECOUPLED) or group.get("decoupled_weight_decay")
        if decoupled:
            lr = group["lr"]
            # The optimizer will multiply by 1 − lr·own; divide by it here.
            decayed = (weight - lr * gradient) / (1 - lr * own)
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None:  # a fused optimizer skips the step on the device if this is set
                decayed = torch.where(found_inf.to(weight.device, non_blocking=True) > 0, weight, decayed)
            weight.copy_(decayed)
        else:
            gradient = gradient.sub(weight, alpha=own)
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:
                gradient = gradient * scale.to(weight.device, non_blocking=True)
            assert p.grad is not None
            _local(p.grad).add_(gradient, alpha=-1 if group.get("maximize") else 1)


def _factors(model: nn.Module) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
    """Yield (matrix, down, up) of every factorized matrix once, also for low-rank layers inside low-rank layers."""
    seen: set[int] = set()
    for _, _, module in named_modules(model):
        if isinstance(module, LowRank):
            for x, (down, up) in module.factors().items():
                if id(down) not in seen:
                    seen.add(id(down))
                    yield x, down, up


def _decay_gradients(x: Matrix, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ∇½‖UV‖² for `down` and `up` in fp32 or fp64, without computing the large product U V."""
    with torch.autocast(down.device.type, enabled=False):
        U, V = map(at_least_fp32, x.to_factors(_full(down), _full(up)))
        return x.from_factors(U @ (V @ V.mT), (U.mT @ U) @ V)


# Under FSDP2 every parameter is a DTensor: the products need the full tensor, the update the local shard.


def _full(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _local_part(full: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()
