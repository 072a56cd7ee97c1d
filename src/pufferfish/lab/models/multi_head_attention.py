"""`MultiHeadAttention` with one linear layer per projection."""

from torch import Tensor, nn
from torch.nn import functional as F


class MultiHeadAttention(nn.Module):
    """Multi-head attention of `queries` over `memory`; each projection covers all heads and has no bias."""

    def __init__(self, d: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * head_size
        self.q = nn.Linear(d, inner, bias=False)
        self.k = nn.Linear(d, inner, bias=False)
        self.v = nn.Linear(d, inner, bias=False)
        self.o = nn.Linear(inner, d, bias=False)

    def forward(
        self, queries: Tensor, memory: Tensor, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend; `mask` is true where attention is allowed, `causal` masks later positions."""
        q, k, v = self._split(self.q(queries)), self._split(self.k(memory)), self._split(self.v(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        output: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (batch, time, features) to (batch, heads, time, head_size)."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)
