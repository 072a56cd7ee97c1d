"""`recompute_`: blocks that keep little more than their rank-wide activations and recompute the rest in backward.

Elements kept for backward, and MACs computed a second time, per block and token, at width d and rank ratio 0.25; in
brackets the MACs of the whole forward pass without attention:

| block | | no recomputation | ordinary checkpointing | `recompute_` |
|---|---|---|---|---|
| 4d GELU feed-forward | elements / d | 17.5 | 1 | 3.5 |
| | MACs / d² (4.5) | 0 | 4.25 + attention | 2 |
| 4d SwiGLU, d/4 keys and values | elements / d | 23.9 | 1 | 3.4 |
| | MACs / d² (4.9) | 0 | 4.66 + attention | 2.53 |

`recompute_` keeps the input of the block (1 d), the outputs of all first factors (1.5 d and 1.4 d) and the output of
attention (1 d). A product of K inputs and N outputs costs K MACs for each element that it spares: first factors (K = d
or 4d) and attention are expensive, second factors (K = d/4), norms and activation functions are cheap.
"""

import fnmatch
import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import grouped  # noqa: F401  registers grouped_product
from .base import LowRank, low_rank_type
from .names import named_modules

_aten = torch.ops.aten

#: Products, with the position of their left factor; the right one follows it. Not `two_products`: to keep its narrow output
#: is to keep the wide one too, and to read its input again costs little.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
    _aten._grouped_mm.default: 0,
    torch.ops.pufferfish.grouped_product.default: 0,
}


def recompute_(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Let blocks of a model keep few activations for the backward pass and recompute the others, in place.

    A block keeps its input, the outputs of products that are narrower than their inputs (the first factors of low-rank
    layers) and the outputs of attention kernels. Gradients do not change. Names, types and state dicts stay the same, and
    layers inside can be factorized and merged before or after. Call it before `torch.compile`. A block whose layers are
    dense saves memory too, but recomputes more.

    A forward pass allows one backward pass: `retain_graph=True` and second derivatives raise an error.

    Args:
        model: Plain, or wrapped in DDP or FSDP2.
        blocks: Name patterns (`fnmatch`). If nested modules match, the outermost is the block; single layers and
            containers without a forward pass are not blocks.

    Returns:
        Names of the blocks.

    >>> def block():
    ...     return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> model = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(64, 2)})
    >>> recompute_(model, ["blocks.*"])
    ['blocks.0', 'blocks.1']
    """
    if isinstance(blocks, str):
        raise TypeError(f"blocks={blocks!r}: give a list of patterns, blocks=[{blocks!r}]")
    patterns = tuple(blocks)
    unused = set(patterns)
    chosen: dict[str, nn.Module] = {}
    for name, _, module in named_modules(model):
        matching = {x for x in patterns if fnmatch.fnmatchcase(name, x)}
        if name and matching and _is_block(module):
            unused -= matching
            if not any(name.startswith(f"{outer}.") for outer in chosen):
                _check(name, module)
                chosen[name] = module
    if unused:
        raise ValueError(
            f"blocks: the patterns {sorted(unused)} match no module with a forward pass and layers inside; "
            "give names of blocks, as in [name for name, _ in model.named_modules()]"
        )
    # The compiler refuses to checkpoint code with side effects. Layers that share an input have one, within a block: the
    # first one leaves the others' results. It need not happen again in the recomputation.
    from torch._dynamo import config  # not on top: it takes a second, and `checkpoint` imports it anyway

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for module in chosen.values():
        # Bound to the module, so that a deep copy of the module calls itself.
        module.forward = MethodType(forward, module)
    return list(chosen)


def _is_block(module: nn.Module) -> bool:
    kind = type(module)
    is_layer = isinstance(module, LowRank) or low_rank_type(kind) is not None
    return bool(module._modules) and not is_layer and kind.forward is not nn.Module.forward


def _check(name: str, block: nn.Module) -> None:
    own = vars(block).get("forward")
    if own is not None and getattr(own, "__func__", None) not in (forward, type(block).forward):
        raise ValueError(f"{name}: its forward was replaced; call recompute_ before other code replaces it")
    for inner, child in block.named_modules():
        if getattr(child, "track_running_stats", False):
            raise ValueError(
                f"{name}.{inner}: {type(child).__name__} would update its running statistics twice in a step; "
                "recompute blocks without it, or replace it by a norm without statistics (GroupNorm, LayerNorm)"
            )


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a block that recomputes. An attribute of the module, which hides the method of its class."""
    run = functools.partial(type(self).forward, self, **kwargs)  # `checkpoint` has keywords of its own
    if not torch.is_grad_enabled():
        return run(*args)
    if any(type(x).__name__.endswith("Cache") for x in (*args, *kwargs.values())):
        raise ValueError(
            f"{type(self).__name__}: recomputing it would append to the cache of keys and values a second time; "
            "train without the cache (transformers: model.config.use_cache = False)"
        )
    if torch.compiler.is_compiling():
        return checkpoint(run, *args, use_reentrant=False, context_fn=_CONTEXTS)
    # The state of a generator cannot be read while a CUDA graph is captured: keep the random numbers instead.
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    # The cache would keep 16-bit copies of the weights, and a weight found in it is not cast in forward but in the
    # recomputation, where torch raises for an operator that it has not seen.
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=not capturing,
            context_fn=_CONTEXTS_WITH_RANDOM if capturing else _CONTEXTS,
        )
    finally:
        torch.set_autocast_cache_enabled(cache)


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide about one operator: keep narrow products and attention."""
    keep = _is_attention(op) or _is_narrow(op, args)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def policy_with_random(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`policy` that also keeps the outputs of operators that draw random numbers."""
    if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        return CheckpointPolicy.MUST_SAVE
    return policy(context, op, *args, **kwargs)


@functools.cache
def _is_attention(op: Any) -> bool:
    return "attention" in str(op) or "attn" in str(op)  # torch's kernels, and those of other libraries


def _is_narrow(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether the output of a product is narrower than its input."""
    if op in _PRODUCTS:
        left, right = args[_PRODUCTS[op] :][:2]
        return bool(right.shape[-1] < left.shape[-1])
    if op is _aten.convolution.default:
        transposed = args[6]  # never the first factor
        return bool(not transposed and args[1].shape[0] < args[0].shape[1])
    return False


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, policy)
_CONTEXTS_WITH_RANDOM = functools.partial(create_selective_checkpoint_contexts, policy_with_random)
