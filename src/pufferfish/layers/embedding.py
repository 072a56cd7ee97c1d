"""Low-rank `nn.Embedding`: a narrow lookup, then n × r → n × d."""

from collections.abc import Mapping
from typing import cast

from torch import nn

from .base import LowRankSingle, register
from .matrix import Matrix


class LowRankEmbedding(LowRankSingle):
    """`y = U v`, where v is a row of a narrow table: `down` is an `nn.Embedding` of width r, `up` an `nn.Linear`.

    It is planned only on request, with `pufferfish.plan(…, embed=rank)`: it saves parameters and gradient bytes, but
    where the dense layer only copies a row, it multiplies. If the row of `padding_idx` is zero, it stays zero.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Embedding(1000, 64, padding_idx=0))
    >>> _ = pf.factorize_(model, pf.plan(model, embed=0.25))
    >>> model[0]
    LowRankEmbedding(
      rank=16
      (down): Embedding(1000, 16, padding_idx=0)
      (up): Linear(in_features=16, out_features=64, bias=False)
    )
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.Embedding, dense)
        r, dtype = ranks[""], dense.weight.dtype
        self.down = nn.Embedding(dense.num_embeddings, r, dense.padding_idx, device="meta", dtype=dtype)
        self.up = nn.Linear(r, dense.embedding_dim, bias=False, device="meta", dtype=dtype)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        # A lookup is the product with a one-hot vector; the table stores inputs × outputs.
        n, m = cast(nn.Embedding, dense).weight.shape
        return [Matrix(name="", weight="weight", shape=(n, m), m=m, n=n, transposed=True, lookup=True)]

    @classmethod
    def unfit(cls, dense: nn.Module) -> str:
        dense = cast(nn.Embedding, dense)
        if dense.max_norm is not None:
            return "unsupported: max_norm rescales rows of the table, and the table becomes a product"
        if dense.sparse or dense.scale_grad_by_freq:
            option = "sparse" if dense.sparse else "scale_grad_by_freq"
            return f"unsupported: {option} changes the gradient of the table, and `up` has no such gradient"
        return ""


register(nn.Embedding, LowRankEmbedding)
