"""`FrobeniusDecay`: weight decay on the product of two factors instead of on each factor."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from ..layers import LowRank, Matrix, local_part, named_modules, rebuilt
from .optimizers import Optimizers, check_optimizers
from .rewrite import whole

Factors = tuple[Matrix, Tensor, Tensor]  # the matrix, `down` and `up`
Modules = tuple[Matrix, nn.Module, nn.Module]  # the matrix, the modules of `down.weight` and `up.weight`

#: Optimizers that add weight decay to the gradient, or subtract it from the weights if a flag in the group is set.
_COUPLED = (
    optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
#: Optimizers that always subtract it from the weights.
_DECOUPLED = (optim.Adafactor, optim.Muon)
#: Largest number of elements of the `down` or `up` factors in one product: enough to fill a GPU, few in memory.
_BATCH = 2**23


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

    Matrices of equal shape are decayed together by a few kernels, also inside a CUDA graph. The products take 2r / 3t
    of the FLOPs of the low-rank layers, at rank r and t tokens (or pixels) per step. They are computed in fp32, or in
    fp64 for fp64 factors.

    Args:
        model: Plain, DDP, compiled or sharded by FSDP2 (then the factors are gathered, a few matrices at a time).
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
        optimizers = check_optimizers(optimizer)
        parameters = {id(p) for p in model.parameters()}
        for one in optimizers:
            if decoupled is None and not isinstance(one, _COUPLED + _DECOUPLED):
                raise TypeError(
                    f"FrobeniusDecay: it is not known how {type(one).__name__} applies weight decay; pass "
                    "decoupled=False if the decay is added to the gradient, decoupled=True if it is subtracted from the weights"
                )
        if not any(id(p) in parameters for one in optimizers for g in one.param_groups for p in g["params"]):
            raise ValueError(
                "FrobeniusDecay: no optimizer has a parameter of this model; pass the optimizer that trains it"
            )
        self.model = model
        self.strength = strength
        self.decoupled = decoupled
        self._listed: WeakKeyDictionary[optim.Optimizer, tuple[list[int], list[Modules]]]
        self._listed = WeakKeyDictionary()
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
        batches: dict[tuple[Any, ...], list[Factors]] = {}
        for x, down, up in self._factors(optimizer):
            settings = groups.get(id(down)), groups.get(id(up))
            if any(settings):
                layout = x.blocks, x.m, x.n, x.lookup, x.up_transposed, down.shape, up.shape
                key = *layout, down.dtype, down.device, *map(id, settings)
                batches.setdefault(key, []).append((x, down, up))
        for batch in batches.values():
            x, down, up = batch[0]
            size = 1 if x.lookup else max(1, _BATCH // max(down.numel(), up.numel()))
            for i in range(0, len(batch), size):
                self._decay_batch(optimizer, batch[i : i + size], groups.get(id(down)), groups.get(id(up)))

    def _factors(self, optimizer: optim.Optimizer) -> list[Factors]:
        """List (matrix, down, up) of the factorized matrices in the model.

        The model is searched only if the optimizer has other parameters than before. Modules are listed, because
        `Module.to` and `load_state_dict` may replace their parameters.
        """
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        known, modules = self._listed.get(optimizer, ([], []))
        if ids != known:
            self.model = rebuilt(self.model)
            modules = list(_modules(self.model))
            self._listed[optimizer] = ids, modules
        return [(x, down.get_parameter("weight"), up.get_parameter("weight")) for x, down, up in modules]

    def _decay_batch(
        self,
        optimizer: optim.Optimizer,
        batch: Sequence[Factors],
        down_group: dict[str, Any] | None,
        up_group: dict[str, Any] | None,
    ) -> None:
        """Decay the factors of matrices of equal shape. A group is None if its factors do not change."""
        x = batch[0][0]
        downs, ups = [down for _, down, _ in batch], [up for _, _, up in batch]
        if len(batch) > 1:  # together they are one matrix with more blocks
            x = dataclasses.replace(x, blocks=len(batch) * x.blocks, shape=(len(batch), *x.shape))
        with torch.autocast(downs[0].device.type, enabled=False):
            U, V = x.to_factors(_concatenate(downs), _concatenate(ups))
            dU = torch.bmm(U, self._multiplier(optimizer, up_group, torch.bmm(V, V.mT)).to(U.dtype))
            dV = torch.bmm(self._multiplier(optimizer, down_group, torch.bmm(U.mT, U)).to(V.dtype), V)
        targets, changes = [], []  # applied together: each depends on both factors
        for change, params, group in zip(
            x.from_factors(dU, dV), (downs, ups), (down_group, up_group), strict=True
        ):
            if group is not None:
                tensors = params if self._is_decoupled(optimizer, group) else [p.grad for p in params]
                parts = change.to(params[0].dtype).chunk(len(params))
                targets += [local_part(t) for t in tensors if t is not None]
                changes += [_local_part(part, p) for part, p in zip(parts, params, strict=True)]
        torch._foreach_add_(targets, changes)

    def _is_decoupled(self, optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
        if self.decoupled is not None:
            return self.decoupled
        return isinstance(optimizer, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))

    def _multiplier(self, optimizer: Any, group: dict[str, Any] | None, gram: Tensor) -> Tensor:
        """Compute M from the other factor's Gram matrix G: U M or M V is added to the gradient or to the weights.

        M = λG − own·I for the gradient, where `own` is the optimizer's own weight decay.
        """
        if group is None:
            return gram
        own = group.get("weight_decay", 0.0)
        M = gram.mul_(self.strength)
        if own:
            M.diagonal(dim1=-2, dim2=-1).sub_(own)
        if self._is_decoupled(optimizer, group):
            lr = group["lr"]
            # The optimizer will multiply the weights by 1 − lr·own; divide by it here.
            M.mul_(-lr / (1 - lr * own))
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None:  # a fused optimizer skips the step on the device if this is set
                M.mul_(found_inf.to(M.device, non_blocking=True) == 0)
        else:
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:
                M.mul_(scale.to(M.device, non_blocking=True))
            if group.get("maximize"):
                M.neg_()
        return M


def _modules(model: nn.Module) -> Iterator[Modules]:
    """Yield every factorized matrix once, with its modules.

    That includes low-rank layers inside low-rank layers.
    """
    seen: set[int] = set()
    for _, _, module in named_modules(model):
        if isinstance(module, LowRank):
            for x, (down, _) in module.factors().items():
                if id(down) not in seen:
                    seen.add(id(down))
                    hold_down, hold_up = (
                        module.get_submodule(name.removesuffix(".weight")) for name in (x.down, x.up)
                    )
                    yield x, hold_down, hold_up


def _concatenate(factors: Sequence[Tensor]) -> Tensor:
    """Concatenate factors of equal shape along their first dimension, in the dtype for products."""
    first = factors[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    if len(factors) == 1 and first.dtype == dtype:
        return whole(first)
    out = torch.empty(len(factors) * len(first), *first.shape[1:], dtype=dtype, device=first.device)
    torch._foreach_copy_(out.chunk(len(factors)), [whole(p) for p in factors])  # and converts, in one kernel
    return out


# Under FSDP2 every parameter is a DTensor: the products need the whole tensor, the update the local shard.


def _local_part(full: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()
