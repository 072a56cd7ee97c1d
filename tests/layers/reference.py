"""The slow, obvious reference: multiply the factors out and run torch's own dense layer with the product.

Written from the layers' definitions, a block at a time, without the library's `Matrix`.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import pufferfish as pf
from matrices import forced
from pufferfish import layers

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}


def factorized(dense: nn.Module, rank: int = 2, **options: Any) -> Any:
    """A low-rank copy of one dense layer, or of every layer in a larger module."""
    model = nn.Sequential(copy.deepcopy(dense))
    pf.factorize_(model, forced(model, rank=rank, **options))
    assert any(isinstance(module, layers.LowRank) for module in model.modules())
    return model[0]


def multiplied_out(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the dense model that `model` stands for, differentiable in the factors."""
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, layers.LowRank) and not _inside_attention(model, path):
            prefix = f"{path}." if path else ""
            found = {name: value for name, value in found.items() if not name.startswith(prefix)}
            found |= {f"{prefix}{name}": value for name, value in _dense_parameters(module).items()}
    return found


def reference(model: nn.Module, dense: nn.Module) -> Callable[..., Any]:
    """`dense`, run with the multiplied-out parameters of `model`: gradients reach the factors."""
    return lambda *args, **kwargs: functional_call(dense, multiplied_out(model), args, kwargs)


def assert_same(
    low_rank: nn.Module,
    dense: nn.Module,
    inputs: Iterable[Tensor],
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs),
    reference_call: Callable[..., Any] | None = None,
) -> None:
    """Outputs and gradients (of all parameters and inputs) are those of the reference in float64.

    `reference_call` is `call` for the reference, where that differs.
    """
    inputs = [x.detach().requires_grad_() for x in inputs]
    exact, dense = copy.deepcopy(low_rank).double(), copy.deepcopy(dense).double()
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    tolerance = TOLERANCE[inputs[0].dtype]

    ours = tensors(call(low_rank, *inputs))
    assert {x.dtype for x in ours if x.is_floating_point()} == {inputs[0].dtype}
    theirs = tensors((reference_call or call)(reference(exact, dense), *exact_inputs))
    assert_close(ours, theirs, tolerance)
    assert_close(
        _gradients(ours, [*low_rank.parameters(), *inputs]),
        _gradients(theirs, [*exact.parameters(), *exact_inputs]),
        tolerance,
    )


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Equal up to `tolerance` times the largest value of all: some are zero but for rounding."""
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    scale = max((float(x.detach().abs().max()) for x in theirs if x.numel()), default=0.0)
    assert scale > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=0, atol=tolerance * scale)


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order; a PackedSequence is a tuple too."""
    if isinstance(output, Tensor):
        return [output]
    return [x for part in output if part is not None for x in tensors(part)]


def _gradients(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    outputs = [x for x in outputs if x.is_floating_point()]
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in outputs]
    return list(torch.autograd.grad(outputs, wanted, weights, materialize_grads=True))


def _inside_attention(model: nn.Module, path: str) -> bool:
    owner = path.rpartition(".")[0]
    return path != "" and isinstance(model.get_submodule(owner), layers.LowRankMultiheadAttention)


def _dense_parameters(layer: layers.LowRank) -> dict[str, Tensor]:
    match layer:
        case layers.LowRankConv1D():
            found = {"weight": (layer.up.weight @ layer.down.weight).T, "bias": layer.up.bias}
        case layers.LowRankEmbedding():
            found = {"weight": layer.down.weight @ layer.up.weight.T}
        case layers.LowRankLinear():
            found = {"weight": layer.up.weight @ layer.down.weight, "bias": layer.up.bias}
        case layers.LowRankConv() | layers.LowRankConvTranspose():
            # A group at a time; r: rank, i and o: channels in and out, the dots: the kernel.
            pairs = zip(
                layer.down.weight.chunk(layer.groups), layer.up.weight.chunk(layer.groups), strict=True
            )
            if isinstance(layer, layers.LowRankConvTranspose):
                products = [torch.einsum("ri,ro...->io...", down.flatten(1), up) for down, up in pairs]
            else:
                products = [torch.einsum("or,ri...->oi...", up.flatten(1), down) for down, up in pairs]
            found = {"weight": torch.cat(products), "bias": layer.up.bias}
        case layers.LowRankMultiheadAttention():
            found = _attention_parameters(layer)
        case _:
            found = dict(layer.named_parameters(recurse=False))
            for name, factors in layer.named_children():
                gates = factors.up.groups
                pairs = zip(factors.down.weight.chunk(gates), factors.up.weight.chunk(gates), strict=True)
                found[name] = torch.cat([up[:, :, 0] @ down for down, up in pairs])
    return {name: value for name, value in found.items() if value is not None}


def _attention_parameters(layer: layers.LowRankMultiheadAttention) -> dict[str, Tensor | None]:
    parts = {
        name: _dense_parameters(part) if isinstance(part, layers.LowRank) else dict(part.named_parameters())
        for name, part in layer.named_children()
    }
    found = dict(layer.named_parameters(recurse=False))
    weights = [parts[name]["weight"] for name in "qkv"]
    if layer._qkv_same_embed_dim:
        found["in_proj_weight"] = torch.cat(weights)
    else:
        found |= dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True))
    if "bias" in parts["q"]:
        found["in_proj_bias"] = torch.cat([parts[name]["bias"] for name in "qkv"])
    return found | {f"out_proj.{name}": value for name, value in parts["out"].items()}
