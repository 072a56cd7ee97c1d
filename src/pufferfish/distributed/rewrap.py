"""A DistributedDataParallel wrapper re-initialised in place around its changed model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..layers.base import CALL_HOOKS

# Arguments that can be read back under their own names; newer ones are taken where this torch has them.
_KEPT = (
    "device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view",
    "static_graph", "mixed_precision", "skip_all_reduce_unused_params", "batched_grad_copy",
)  # fmt: skip


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper: the model itself, or inside `torch.compile` or an AveragedModel."""
    while True:
        if "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, AveragedModel):
            model = model.module
        else:
            break
    return model if isinstance(model, DistributedDataParallel) else None


def check_rewrap(ddp: DistributedDataParallel, rewrap: dict[str, Any]) -> None:
    """Refuse what cannot be read back from the wrapper, before anything is changed."""
    if ddp._delay_all_reduce_params and "delay_all_reduce_named_params" not in rewrap:
        raise ValueError(
            "this DDP was given delay_all_reduce_named_params, which it does not keep; give it (and "
            "param_to_hook_all_reduce) again in Switch(rewrap={…})"
        )


def rewrap_(ddp: DistributedDataParallel, rewrap: dict[str, Any]) -> None:
    """Run the wrapper's constructor again on the same object, with the arguments it was made with.

    Whoever holds the wrapper keeps holding the right one: loops, trainers, compiled graphs. Nothing is
    synchronised: all ranks hold the same model already, and buffers may be a rank's own.
    """
    arguments: dict[str, Any] = {name: getattr(ddp, name) for name in _KEPT if hasattr(ddp, name)}
    if hasattr(ddp, "forward_sync_buffers"):
        arguments["forward_sync_buffers"] = ddp.forward_sync_buffers
    else:
        arguments["broadcast_buffers"] = ddp.broadcast_buffers
    cap = ddp.bucket_bytes_cap / 2**20
    before, after = map(_gradient_bytes, (ddp._module_parameters, ddp.module.parameters()))
    if not ddp.bucket_bytes_cap_default:
        arguments["bucket_cap_mb"] = cap
    elif after < before:  # as many messages as before: in one, all gradients would wait for each other
        arguments["bucket_cap_mb"] = max(1.0, cap * after / before)
    hooks = list(ddp._comm_hooks) if ddp.mixed_precision is None else []
    kept = {name: vars(ddp)[name] for name in (*CALL_HOOKS, "training") if name in vars(ddp)}
    module = ddp.module
    DistributedDataParallel.__init__(ddp, module, **(arguments | {"init_sync": False} | rewrap))
    vars(ddp).update(kept)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def _gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters if p.requires_grad)
