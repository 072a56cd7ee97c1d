"""The LSTM and the Transformer of the Pufferfish paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .scaled import scaled

State = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """Embedding, stacked LSTM, and a decoder tied to the embedding.

    Args:
        width: factor on `d`, for a narrower model.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 33_278,
        d: int = 1500,
        layers: int = 2,
        dropout: float = 0.65,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        d = scaled(d, width)
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, d, layers, dropout=dropout)
        self.decoder = nn.Linear(d, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (time, batch, vocabulary) of tokens (time, batch), and the final state."""
        x, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.decoder(self.dropout(x)), state


def sinusoids(length: int, d: int) -> Tensor:
    """Position encodings (length, d): sines in the first half of the columns, cosines in the second."""
    frequencies = torch.exp(torch.arange(d // 2) * (-math.log(10_000.0) / (d // 2)))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class FeedForward(nn.Module):
    """Two linear layers with a ReLU in between."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return y


class EncoderLayer(nn.Module):
    """Pre-norm layer: self-attention and feed-forward, each with a residual connection."""

    def __init__(self, d: int, heads: int, head_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d)
        self.attention = MultiHeadAttention(d, heads, head_size)
        self.ffn_norm = nn.LayerNorm(d)
        self.ffn = FeedForward(d, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, mask=mask))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class DecoderLayer(nn.Module):
    """Pre-norm layer: causal self-attention, cross-attention to the encoder's output, feed-forward."""

    def __init__(self, d: int, heads: int, head_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d)
        self.attention = MultiHeadAttention(d, heads, head_size)
        self.cross_norm = nn.LayerNorm(d)
        self.cross = MultiHeadAttention(d, heads, head_size)
        self.ffn_norm = nn.LayerNorm(d)
        self.ffn = FeedForward(d, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, causal=True))
        x = x + self.dropout(self.cross(self.cross_norm(x), memory, mask=mask))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class Transformer(nn.Module):
    """Pre-norm encoder and decoder; source embedding, target embedding and output layer are tied.

    Sentences are padded on the right with `padding`. Padding of the source is masked; padding of the target comes
    after every real token, so the causal mask hides it.

    Args:
        width: factor on `d`, `hidden` and the number of heads, for a narrower model; heads keep their size.
    """

    positions: Tensor

    def __init__(
        self,
        *,
        vocabulary: int = 9521,
        d: int = 512,
        layers: int = 6,
        heads: int = 8,
        hidden: int = 2048,
        dropout: float = 0.1,
        padding: int = 0,
        length: int = 256,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        head_size, heads = d // heads, max(1, round(width * heads))
        d, hidden = scaled(d, width), scaled(hidden, width)
        sizes = (d, heads, head_size, hidden)
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, d)
        self.register_buffer("positions", sinusoids(length, d), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes, dropout) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(d)
        self.decoder = nn.ModuleList(DecoderLayer(*sizes, dropout) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(d)

        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (batch, target time, vocabulary) of the token after each target token."""
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        """Output of the encoder (batch, source time, d), the `memory` argument of `decode`."""
        mask = self._mask(source)
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Like `forward`, from an encoded source; `source` is used only for its padding mask."""
        mask = self._mask(source)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        scale = math.sqrt(self.embedding.embedding_dim)
        x: Tensor = self.dropout(self.embedding(tokens) * scale + self.positions[: tokens.shape[1]])
        return x

    def _mask(self, source: Tensor) -> Tensor:
        """Attention mask, true at real tokens, that broadcasts over heads and queries."""
        return (source != self.padding)[:, None, None, :]


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
