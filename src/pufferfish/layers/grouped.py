"""`GroupedLinear`: a stack of linear layers, one per expert, applied to rows that are sorted by expert; sorting and back."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from .base import autocast_dtype


class GroupedLinear(nn.Module):
    """`y = W_e x + b_e` for every row x of expert e.

    Args:
        experts: Number of experts.
        n: Inputs of each.
        m: Outputs of each.
        transposed: Whether the weight is stored as (experts, n, m) instead of (experts, m, n).

    >>> layer = GroupedLinear(2, 8, 4)
    >>> rows, ends = torch.ones(5, 8), torch.tensor([3, 5])  # rows 0 to 2 belong to expert 0, 3 and 4 to expert 1
    >>> torch.equal(layer(rows, ends)[3:], rows[3:] @ layer.weight[1].T)
    True
    """

    def __init__(
        self,
        experts: int,
        n: int,
        m: int,
        bias: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.n, self.m, self.transposed = experts, n, m, transposed
        shape = (experts, n, m) if transposed else (experts, m, n)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, m, device=device, dtype=dtype)) if bias else None
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases uniformly from ±1/√n, as `nn.Linear` does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.n**-0.5), self.n**-0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply each row by the weight of its expert.

        Args:
            rows: (rows, n), sorted by expert.
            ends: Index of the row after the last one of each expert, (experts,).
        """
        return grouped_linear(rows, self.weight if self.transposed else self.weight.mT, ends, self.bias)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.n}, out_features={self.m}, bias={self.bias is not None}"


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply sorted rows by the weights (experts, n, m) of their experts."""
    if dtype := autocast_dtype(rows.device):  # autocast does not cover `grouped_mm`
        rows, weight = rows.to(dtype), weight.to(dtype)
    # torch's kernel takes no fp64, and its shape inference (meta device, compile, export) takes only bf16.
    inferred = rows.is_meta or torch.compiler.is_compiling()
    if rows.dtype == torch.float64 or (inferred and rows.dtype != torch.bfloat16):
        output = cast(Tensor, grouped_product(rows, weight, ends))
    else:
        output = _Contiguous.apply(_aligned_product(rows, weight, ends))  # type: ignore[no-untyped-call]
    if bias is not None:
        index = torch.arange(len(rows), device=rows.device)
        output = output + bias.to(output.dtype)[torch.searchsorted(ends, index, right=True)]
    return output


def _aligned_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm`, which requires that rows start at multiples of 16 bytes: pad others with zeros."""
    n, m = weight.shape[1:]
    multiple = 16 // rows.element_size()
    if n % multiple or m % multiple:
        rows = F.pad(rows, (0, -n % multiple))
        weight = F.pad(weight, (0, -m % multiple, 0, -n % multiple))
    return F.grouped_mm(rows, weight, offs=ends.to(torch.int32))[:, :m]


# The same as a loop over experts. Custom operators, because the sizes of the groups are data: compilers and the meta
# device see the shapes of inputs and outputs only.


@torch.library.custom_op("pufferfish::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows (rows, n) by the weights (experts, n, m) of their experts."""
    return torch.cat([part @ W for part, W in zip(_groups(rows, ends), weight, strict=True)])


@torch.library.custom_op("pufferfish::grouped_outer", mutates_args=())
def grouped_outer(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Gradient (experts, n, m) of the weights: for each expert the sum of the outer products of its rows."""
    pairs = zip(_groups(rows, ends), _groups(grad, ends), strict=True)
    return torch.stack([x.mT @ y for x, y in pairs])


def _groups(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", rows.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist()))


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    return (
        grouped_product(grad, weight.mT, ends) if needs_rows else None,
        grouped_outer(rows, grad, ends) if needs_weight else None,
        None,
    )


grouped_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula([torch.ops.pufferfish.grouped_product, torch.ops.pufferfish.grouped_outer])
def _flops(rows: Sequence[int], other: Sequence[int], ends: Sequence[int], **_: Any) -> int:
    return 2 * math.prod(rows) * other[-1]


class _Contiguous(torch.autograd.Function):
    """Identity whose gradient is contiguous: `grouped_mm` raises for an expanded one, as of `sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class Routing:
    """The order that sorts tokens by expert.

    Args:
        index: Experts of each token, (tokens, k).
        experts: Number of experts.

    >>> routing = Routing(torch.tensor([[1, 0], [2, 1]]), experts=3)
    >>> routing.ends  # one row for expert 0, two for expert 1, one for expert 2
    tensor([1, 3, 4])
    >>> routing.to_experts(torch.tensor([[10.0], [20.0]])).flatten()
    tensor([10., 10., 20., 20.])
    """

    def __init__(self, index: Tensor, experts: int) -> None:
        self.k = index.shape[-1]
        sorted_index, self.order = index.flatten().sort(stable=True)
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(len(self.order), device=index.device)
        # Like bincount and cumsum, but without waiting for the device.
        self.ends = torch.searchsorted(sorted_index, torch.arange(experts, device=index.device), right=True)

    def to_experts(self, tokens: Tensor) -> Tensor:
        """Rows of all tokens, k for each, sorted by expert: (tokens × k, features)."""
        rows: Tensor = _Permute.apply(tokens, self.order, self.inverse, self.k)  # type: ignore[no-untyped-call]
        return rows

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Rows in the order of the tokens: (tokens, k, features)."""
        back: Tensor = _Permute.apply(rows, self.inverse, self.order, 1)  # type: ignore[no-untyped-call]
        return cast(Tensor, back.unflatten(0, (-1, self.k)))


class _Permute(torch.autograd.Function):
    """`x[order // k]` for a permutation of k copies of each row; its gradient is a gather too, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k if k > 1 else order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad[inverse]
        return grad.unflatten(0, (-1, ctx.k)).sum(1) if ctx.k > 1 else grad, None, None, None
