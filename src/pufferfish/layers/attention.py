"""Low-rank `nn.MultiheadAttention`: q, k, v and out each have two factors, shared by all heads."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import LowRank, any_requires_grad, register
from .linear import LowRankLinear
from .matrix import Matrix
from .product_weight import ProductWeight
from .shared_input import SharedInput

_INPUTS = {"q": "query", "k": "key", "v": "value"}  # in the order of `forward`'s arguments


class LowRankMultiheadAttention(LowRank):
    """Low-rank `nn.MultiheadAttention` with the same arguments and outputs.

    `q`, `k`, `v` and `out` are low-rank or plain Linear layers. The dense parameters can still be read
    (`in_proj_weight`, `out_proj.weight` …), but not changed. `nn.TransformerEncoderLayer` does not use its fused
    kernel, which needs dense weights. Call `merge_` for fast inference.
    """

    # Copied from the dense layer by the base class.
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    # Registered by name in __init__.
    q: nn.Linear | LowRankLinear
    k: nn.Linear | LowRankLinear
    v: nn.Linear | LowRankLinear
    out: nn.Linear | LowRankLinear
    _shared: SharedInput | None = None  # of q, k and v
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.MultiheadAttention, dense)
        self._qkv_same_embed_dim = dense._qkv_same_embed_dim
        dtype = dense.out_proj.weight.dtype
        for x in self.matrices(dense):
            linear = nn.Linear(x.n, x.m, bias=x.bias is not None, device="meta", dtype=dtype)
            layer = LowRankLinear(linear, {"": ranks[x.name]}) if x.name in ranks else linear
            self.add_module(x.name, layer)
        factorized = [x for x in (self.q, self.k, self.v) if isinstance(x, LowRankLinear)]
        if dense._qkv_same_embed_dim and len(factorized) > 1:
            self._shared = SharedInput(factorized)
        for name in ("bias_k", "bias_v"):
            value = getattr(dense, name)
            meta = None if value is None else nn.Parameter(value.detach().to("meta"), value.requires_grad)
            self.__dict__.pop(name, None)  # the base class copied it as a plain None
            self.register_parameter(name, meta)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        dense = cast(nn.MultiheadAttention, dense)
        E = dense.embed_dim

        def matrix(name: str, n: int, **place: Any) -> Matrix:
            return Matrix(name=name, dense=f"{name}.weight", shape=(E, n), m=E, n=n, down_row=(n,), **place)

        matrices = []
        bias = None if dense.in_proj_bias is None else "in_proj_bias"
        for i, (name, n) in enumerate((("q", E), ("k", dense.kdim), ("v", dense.vdim))):
            shared = dense._qkv_same_embed_dim
            weight, start = ("in_proj_weight", i * E) if shared else (f"{name}_proj_weight", 0)
            matrices.append(matrix(name, n, weight=weight, start=start, bias=bias, bias_start=i * E))
        bias = None if dense.out_proj.bias is None else "out_proj.bias"
        return [*matrices, matrix("out", E, weight="out_proj.weight", bias=bias)]

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        arguments = dict(zip(_INPUTS.values(), args, strict=False)) | kwargs
        source: Tensor = arguments[_INPUTS.get(matrix.name, "query")]
        return source.numel() // source.shape[-1]

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        arguments = dict(zip(_INPUTS.values(), args, strict=False)) | kwargs
        before = [p for name, p in dense.named_parameters() if name not in (matrix.weight, matrix.bias)]
        # The input of `out` depends on everything before it.
        source = arguments[_INPUTS[matrix.name]] if matrix.name in _INPUTS else (args, kwargs, before)
        return cls.positions(matrix, args, kwargs, output) if any_requires_grad(source) else 0

    @property
    def in_proj_weight(self) -> Tensor | None:
        """Weight of q, k and v of the dense layer, computed from the factors; None if their widths differ."""
        if not self._qkv_same_embed_dim:
            return None
        layers, shape = (self.q, self.k, self.v), (3 * self.embed_dim, self.embed_dim)
        weights = [p for x in layers for p in x.parameters() if p.dim() == 2]
        return ProductWeight.of(lambda: torch.cat([x.weight for x in layers]), shape, weights)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Bias of q, k and v of the dense layer, or None."""
        biases = [x.bias for x in (self.q, self.k, self.v) if x.bias is not None]
        return ProductWeight.of(lambda: torch.cat(biases), (3 * self.embed_dim,), biases) if biases else None

    @property
    def out_proj(self) -> nn.Module:
        """Output projection."""
        return self.out

    # Called by the fused path of nn.TransformerEncoderLayer; uses only the module's settings.
    merge_masks = nn.MultiheadAttention.merge_masks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal=True needs attn_mask as well")
        if query.is_nested:
            # nn.TransformerEncoder makes nested tensors of padded batches in evaluation mode. Only torch's own
            # forward supports them, on the multiplied-out weights above.
            dense = cast(nn.MultiheadAttention, self)
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights)
            with torch._C.DisableTorchFunctionSubclass():  # which would keep torch from supporting them
                return nn.MultiheadAttention.forward(dense, query, key, value, *rest)
        batched = query.dim() == 3
        if not batched:
            query, key, value = _each_once(lambda x: x.unsqueeze(0), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _each_once(lambda x: x.transpose(0, 1), query, key, value)

        # Shapes: (batch, time, E), then (batch, heads, time, head_dim).
        q, k, v = self._projected(query, key, value)
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        # Like torch, use the causal hint instead of the mask only where nothing else is masked: the hint would
        # also hide the extra keys.
        causal = is_causal and key_padding_mask is None and not need_weights and not extra
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, extra)
        attended, weights = self._attended(q, k, v, mask, causal, need_weights)
        output = self.out(attended.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads; k and v with the extra keys of `add_bias_kv` and `add_zero_attn`."""
        if self._shared is not None:  # self-attention: all three; cross-attention: k and v
            inputs = ((self.q, query), (self.k, key), (self.v, value))
            same = tuple(layer for layer, x in inputs if x is key and layer in self._shared.layers)
            self._shared.active = same if len(same) > 1 else ()
        q, k, v = self.q(query), self.k(key), self.v(value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], 1)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int) -> Tensor | None:
        """Combine both masks into one additive mask that broadcasts to (batch, heads, queries, keys)."""
        parts = []
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            parts.append(mask.view(-1, self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask)
        if padding is not None:
            parts.append(_additive(padding, q.dtype)[:, None, None, :])
        if not parts:
            return None
        return F.pad(parts[0] if len(parts) == 1 else parts[0] + parts[1], (0, extra))

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Weighted sums of the values, and the weights (batch, heads, queries, keys) where they are needed."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal), None
        scores = (q * self.head_dim**-0.5) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights


def _each_once(change: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """Change tensors; those that are the same object stay the same object."""
    changed: list[Tensor] = []
    for i, x in enumerate(tensors):
        first = next(j for j, y in enumerate(tensors) if y is x)
        changed.append(change(x) if first == i else changed[first])
    return changed


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise TypeError(f"MultiheadAttention: masks must be bool or floating-point, not {mask.dtype}")
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


register(nn.MultiheadAttention, LowRankMultiheadAttention)
