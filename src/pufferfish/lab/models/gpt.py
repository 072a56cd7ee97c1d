"""`GPT`: a small decoder-only language model over bytes."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .scaled import scaled
from .transformer import MultiHeadAttention


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
