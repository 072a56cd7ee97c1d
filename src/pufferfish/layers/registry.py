"""Which low-rank type belongs to a dense type: the one extension point for new layers."""

from __future__ import annotations

from torch import nn

from .attention import LowRankMultiheadAttention
from .base import LowRank
from .conv import LowRankConv, LowRankConvTranspose
from .linear import LowRankConv1D, LowRankLinear
from .recurrent import LowRankGRU, LowRankLSTM, LowRankRNN

_REGISTRY: dict[type[nn.Module] | str, type[LowRank]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv,
    nn.Conv2d: LowRankConv,
    nn.Conv3d: LowRankConv,
    nn.ConvTranspose1d: LowRankConvTranspose,
    nn.ConvTranspose2d: LowRankConvTranspose,
    nn.ConvTranspose3d: LowRankConvTranspose,
    nn.LSTM: LowRankLSTM,
    nn.GRU: LowRankGRU,
    nn.RNN: LowRankRNN,
    nn.MultiheadAttention: LowRankMultiheadAttention,
    # By name, so that transformers need not be imported.
    "transformers.pytorch_utils.Conv1D": LowRankConv1D,
}


def register(dense: type[nn.Module] | str, low_rank: type[LowRank]) -> None:
    """Teach plans a new layer type, given as the class or as its dotted name.

    Types match exactly: a subclass of `nn.Linear` may compute something else, so it is left alone until
    somebody who knows it says so.

    >>> import torch, pufferfish as pf
    >>> class MyLinear(nn.Linear):
    ...     pass
    >>> model = nn.Sequential(MyLinear(64, 64))
    >>> pf.plan(model).entries[0].reason
    'unsupported: no low-rank form is registered for MyLinear'
    >>> pf.register(MyLinear, pf.layers.LowRankLinear)
    >>> pf.plan(model).entries[0].rank
    16
    """
    if not (isinstance(low_rank, type) and issubclass(low_rank, LowRank)):
        raise TypeError(f"register: {low_rank!r} is not a subclass of pufferfish.layers.LowRank")
    if not (isinstance(dense, str) or (isinstance(dense, type) and issubclass(dense, nn.Module))):
        raise TypeError(f"register: {dense!r} is neither a subclass of nn.Module nor its dotted name")
    _REGISTRY[dense] = low_rank


def low_rank_type(dense: type[nn.Module]) -> type[LowRank] | None:
    """The low-rank type for a dense type, or None."""
    return _REGISTRY.get(dense) or _REGISTRY.get(f"{dense.__module__}.{dense.__qualname__}")
