"""Transformers and mixers written on plain PyTorch."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Inputs, generator, normal


class SelfAttention(nn.Module):
    """Self-attention from three separate Linear projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """ViT: patch convolution, raw class-token and position Parameters beside the layers."""

    def __init__(self, width: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class ViTEncoder(nn.Module):
    """ViT on nn.TransformerEncoder, pooled by nn.MultiheadAttention with kdim, vdim and returned weights."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * 8 * 8, width)
        self.pos = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.query = nn.Parameter(torch.randn(1, 1, 128))
        self.pool = nn.MultiheadAttention(128, 4, kdim=width, vdim=width, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.unfold(x, 8, stride=8).transpose(1, 2)
        x = self.encoder(self.patch(x) + self.pos)
        pooled, weights = self.pool(self.query.expand(len(x), -1, -1), x, x)
        return self.head(pooled[:, 0]), weights


class Seq2SeqTransformer(nn.Module):
    """nn.Transformer: sequence-first, causal and key-padding masks, cross-attention, post-norm."""

    def __init__(self, vocab: int = 96, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.pos = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, 0.0, custom_encoder=encoder)
        self.generator = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor) -> Tensor:
        s = self.source(source) + self.pos(torch.arange(len(source), device=source.device))[:, None]
        t = self.target(target) + self.pos(torch.arange(len(target), device=target.device))[:, None]
        causal = torch.ones(len(t), len(t), dtype=torch.bool, device=t.device).triu(1)
        padding = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
        return self.generator(self.transformer(s, t, tgt_mask=causal, tgt_is_causal=True, **padding))


def _translation() -> Inputs:
    g = generator()
    padding = torch.arange(12)[None] >= torch.tensor([12, 7, 9])[:, None]
    source, target = torch.randint(96, (12, 3), generator=g), torch.randint(96, (9, 3), generator=g)
    return (source, target), {"source_padding": padding}


class LoraLinear(nn.Module):
    """peft's LoRA layer: a frozen base_layer, adapters by name in ModuleDicts, weight passed through."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: int = 16) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": alpha / rank}

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name, scale in self.scaling.items():
            y = y + scale * self.lora_B[name](self.lora_A[name](x))
        return y


def vit_lora() -> nn.Module:
    """A frozen ViT with LoRA wrappers on q and v: layers inside wrappers, mostly frozen parameters."""
    model = ViT().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in ("q", "v"):
            setattr(block.attn, name, LoraLinear(getattr(block.attn, name)))
    model.head.requires_grad_(True)
    return model


CASES = {
    "vit_encoder": Case(build=ViTEncoder, inputs=normal((2, 3, 32, 32))),
    "seq2seq_transformer": Case(build=Seq2SeqTransformer, inputs=_translation),
    "vit_lora": Case(build=vit_lora, inputs=normal((2, 3, 32, 32))),
}
