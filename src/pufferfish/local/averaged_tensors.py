"""Tensors of a model that local steps average, and checks of them."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..layers.names import own_name, unwrap


def check_model(model: nn.Module) -> None:
    """Raise if the model cannot be trained in local steps."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "LocalSteps: DistributedDataParallel already averages every gradient; pass ddp.module"
            )
        if "_fsdp_wrapped_module" in module._modules:
            raise TypeError(
                "LocalSteps: the model is sharded by FSDP; every worker needs the whole unwrapped module"
            )
    params = trainable_parameters(model)
    if not params:
        raise ValueError("LocalSteps: no parameter of the model requires a gradient")
    device = next(iter(params.values())).device
    for name, p in params.items():
        if isinstance(p, DTensor):
            raise TypeError(f"LocalSteps: {name} is a DTensor; every worker needs the whole unwrapped module")
        if not p.is_floating_point() or p.device != device:
            raise TypeError(
                f"LocalSteps: {name} is {p.dtype} on {p.device}; all parameters must be floating-point on {device}"
            )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {own_name(name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that can be averaged: no counters, no caches, no masks with infinities."""
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    floats = {name: b for name, b in inner.named_buffers() if b.is_floating_point() and name in saved}
    return {own_name(name): b for name, b in floats.items() if bool(b.isfinite().all())}


def check_shapes(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], when: str, remedy: str) -> None:
    """Raise if tensors differ from those `before` in name or shape; `when` and `remedy` complete the message."""
    for name in [*tensors, *before]:
        a, b = tensors.get(name), before.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise ValueError(
                f"LocalSteps: {name} is {_shape(a)}, but was {_shape(b)} when the model {when}; {remedy}"
            )


def _shape(x: Tensor | None) -> str:
    return "missing" if x is None else "×".join(map(str, x.shape)) or "a scalar"
