"""`GPT` and `Llama`: decoders that predict the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .scaled import scaled
from .sequences import MultiHeadAttention


class Block(nn.Module):
    """Pre-norm block: causal self-attention and a GELU feed-forward layer, each with a residual connection."""

    def __init__(self, d: int, heads: int, head_size: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d)
        self.attention = MultiHeadAttention(d, heads, head_size)
        self.ffn_norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, inner)
        self.down = nn.Linear(inner, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, causal=True)
        x = x + self.down(F.gelu(self.up(self.ffn_norm(x))))
        return x


class GPT(nn.Module):
    """Decoder-only Transformer with learned positions, pre-norm blocks, and an output layer tied to the embedding.

    Args:
        width: factor on `d` and the number of heads, for a narrower model; heads keep their size.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        d: int = 384,
        layers: int = 6,
        heads: int = 6,
        context: int = 256,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        head_size, inner, heads = d // heads, scaled(4 * d, width), max(1, round(width * heads))
        d = scaled(d, width)
        self.embedding = nn.Embedding(vocabulary, d)
        self.positions = nn.Parameter(torch.empty(context, d))
        self.blocks = nn.ModuleList(Block(d, heads, head_size, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # Layers that add to the residual stream are initialized smaller, the deeper the model (GPT-2).
                residual = name.endswith((".o", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the token after each of `tokens` (batch, time)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def rotary_tables(length: int, size: int, theta: float) -> Tensor:
    """Cosines and signed sines (2, length, 1, size) for `rotate`, for heads of `size` features."""
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).unsqueeze(2)


def rotate(x: Tensor, tables: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of each head of `x` (batch, time, heads, size) by the angles of its position."""
    cos, sin = tables.to(x.dtype)  # under autocast, `x` has a lower precision
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class GroupedQueryAttention(nn.Module):
    """Causal self-attention in which several heads share a key and a value head; no biases."""

    def __init__(self, d: int, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.head_size, self.grouped = head_size, kv_heads < heads
        self.q = nn.Linear(d, heads * head_size, bias=False)
        self.k = nn.Linear(d, kv_heads * head_size, bias=False)
        self.v = nn.Linear(d, kv_heads * head_size, bias=False)
        self.o = nn.Linear(heads * head_size, d, bias=False)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, self.head_size)) for y in (self.q(x), self.k(x), self.v(x)))
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, tables), rotate(k, tables), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        output: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output


class LlamaBlock(nn.Module):
    """Pre-norm block: grouped-query attention and a SwiGLU feed-forward layer, each with a residual connection."""

    def __init__(self, d: int, heads: int, kv_heads: int, head_size: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d, eps=1e-5)
        self.attention = GroupedQueryAttention(d, heads, kv_heads, head_size)
        self.ffn_norm = nn.RMSNorm(d, eps=1e-5)
        self.gate = nn.Linear(d, inner, bias=False)
        self.up = nn.Linear(d, inner, bias=False)
        self.down = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        y = self.ffn_norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Llama(nn.Module):
    """Decoder-only Transformer as in Llama: rotary positions, RMSNorm, SwiGLU and grouped-query attention, no biases.

    Args:
        heads: of the queries, a multiple of `kv_heads`.
        inner: features of the feed-forward layers; 8/3 · d, rounded to a multiple of 64, by default.
        tied: whether the output layer is the embedding; otherwise it is `head`.
        theta: base of the rotary frequencies.
        width: factor on `d`, `inner` and the number of heads, for a narrower model; heads keep their size.

    >>> with torch.device("meta"):
    ...     model = Llama(vocabulary=128_256, d=2048, layers=16, heads=32, kv_heads=8, inner=8192, context=2048)
    >>> sum(p.numel() for p in model.parameters())
    1235814400
    """

    rotary: Tensor

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        d: int = 384,
        layers: int = 6,
        heads: int = 6,
        kv_heads: int = 2,
        inner: int | None = None,
        context: int = 256,
        tied: bool = True,
        theta: float = 10_000.0,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        if d % heads or d // heads % 2 or heads % kv_heads:
            raise ValueError(
                f"Llama: heads={heads} must be a multiple of kv_heads={kv_heads}, and d={d} an even multiple of heads"
            )
        inner = 64 * max(1, round(d / 24)) if inner is None else inner
        head_size, group = d // heads, heads // kv_heads
        kv_heads = max(1, round(width * kv_heads))
        d, inner, heads = scaled(d, width), scaled(inner, width), group * kv_heads
        self.embedding = nn.Embedding(vocabulary, d)
        self.register_buffer("rotary", rotary_tables(context, head_size, theta), persistent=False)
        self.blocks = nn.ModuleList(LlamaBlock(d, heads, kv_heads, head_size, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.head = None if tied else nn.Linear(d, vocabulary, bias=False)

        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # Layers that add to the residual stream are initialized smaller, the deeper the model (GPT-2).
                residual = name.endswith((".o", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the token after each of `tokens` (batch, time)."""
        x, tables = self.embedding(tokens), self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, tables)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
