"""Frobenius decay: weight decay on the product of two factors, in place of each factor's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from ..layers import LowRank, Matrix
from ..layers.names import named_modules
from .carry import Optimizers, as_list, check

#: Weight decay is added to the gradient, or (by a flag in their groups) taken off the weights.
_COUPLED = (
    optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
#: It is always taken off the weights.
_DECOUPLED = (optim.Adafactor, optim.Muon)


class FrobeniusDecay:
    """Decay every low-rank layer's W = U V instead of U and V: λ·∇½‖UV‖² = (λ U V Vᵀ, λ Uᵀ U V).

    That is what weight decay λ of the dense layer would do to the factors. It acts in each
    `optimizer.step`, so after the all-reduce and after clipping, on the low-rank layers that the model has
    at that time: make it before the switch or after. The factors' own weight decay is undone; all other
    parameters keep theirs. Groups stay as they are, so schedulers may go on changing them.

    Where weight decay is part of the gradient (SGD, Adam …) so is this, at the loss scale that a fused
    optimizer gets its gradients in. Where it is taken off the weights (AdamW, `decoupled_weight_decay=True`,
    Muon, Adafactor) so is this: p ← p − lr·λ·(…). Factors without a gradient are left alone.

    Args:
        model: plain, DDP, compiled or sharded by FSDP2 (where it gathers the factors, a matrix at a time).
        optimizer: one or several. Give both factors of a layer to the same one: what a first optimizer has
            changed, a second one sees changed.
        strength: λ.
        decoupled: how an optimizer that is not torch's own treats weight decay.

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
            raise ValueError(f"FrobeniusDecay: strength={strength} is not a number of 0 or more")
        optimizers = as_list(optimizer)
        check(optimizers)
        known = {id(p) for p in model.parameters()}
        for one in optimizers:
            if decoupled is None and not isinstance(one, _COUPLED + _DECOUPLED):
                raise TypeError(
                    f"FrobeniusDecay: whether {type(one).__name__} adds weight decay to the gradient or takes it "
                    "off the weights is not known; say decoupled=False or decoupled=True"
                )
        if not any(id(p) in known for one in optimizers for g in one.param_groups for p in g["params"]):
            raise ValueError("FrobeniusDecay: no optimizer given here holds a parameter of this model")
        self.model = model
        self.strength = strength
        self.decoupled = decoupled
        self._handles = [one.register_step_pre_hook(self._before) for one in optimizers]

    def remove(self) -> None:
        """Stop: the factors have their own weight decay again."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._decay(optimizer)
            return None

        def with_decay() -> Any:  # the gradients are not there before the closure has run
            loss = closure()
            self._decay(optimizer)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], with_decay, *args[2:]), others

    @torch.no_grad()
    def _decay(self, optimizer: optim.Optimizer) -> None:
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
        for x, down, up in _factors(self.model):
            if id(down) in groups or id(up) in groups:
                pulls = _pulls(x, down, up)  # both, before either factor changes
                for p, pull in zip((down, up), pulls, strict=True):
                    if id(p) in groups:
                        self._apply(optimizer, groups[id(p)], p, pull.mul_(self.strength))

    def _apply(self, optimizer: Any, group: dict[str, Any], p: Tensor, pull: Tensor) -> None:
        own = group.get("weight_decay", 0.0)
        weight, pull = _local(p), _part(pull, p)
        if self._is_decoupled(optimizer, group):
            lr = group["lr"]
            # The optimizer will multiply by 1 − lr·own.
            decayed = (weight - lr * pull) / (1 - lr * own)
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None:  # a fused optimizer skips such a step by itself, on the device
                decayed = torch.where(found_inf.to(weight.device, non_blocking=True) > 0, weight, decayed)
            weight.copy_(decayed)
        else:
            pull = pull.sub(weight, alpha=own)
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:
                pull = pull * scale.to(weight.device, non_blocking=True)
            assert p.grad is not None
            _local(p.grad).add_(pull, alpha=-1 if group.get("maximize") else 1)

    def _is_decoupled(self, optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
        if self.decoupled is not None:
            return self.decoupled
        return isinstance(optimizer, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))


def _factors(model: nn.Module) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
    """Every factorized matrix once, also where a low-rank layer is made of low-rank layers."""
    seen: set[int] = set()
    for _, _, module in named_modules(model):
        if isinstance(module, LowRank):
            for x, (down, up) in module.factors().items():
                if id(down) not in seen:
                    seen.add(id(down))
                    yield x, down, up


def _pulls(x: Matrix, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """∇½‖UV‖² for `down` and `up` in fp32 or better. U V itself, the large one, is never made."""
    with torch.autocast(down.device.type, enabled=False):
        U, V = (f.to(torch.promote_types(f.dtype, torch.float32)) for f in x.unfold(_whole(down), _whole(up)))
        return x.fold(U @ (V @ V.mT), (U.mT @ U) @ V)


# FSDP2 keeps a shard of every parameter (a DTensor): the products need the whole, the update our part.


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _part(whole: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
