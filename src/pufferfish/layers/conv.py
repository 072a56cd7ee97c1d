"""Low-rank convolutions: a k×k convolution with few filters and a 1×1 one; transposed ones the other way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from .base import LowRank
from .matrix import Matrix

_CONV: dict[int, type[nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_TRANSPOSED: dict[int, type[nn.Module]] = {
    3: nn.ConvTranspose1d,
    4: nn.ConvTranspose2d,
    5: nn.ConvTranspose3d,
}


class _LowRankConvolution(LowRank):
    up: nn.Module

    @property
    def weight(self) -> Tensor:
        """The product of the factors, shaped like the dense layer's weight. Read-only."""
        return self.product()

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.up.bias)


class LowRankConv(_LowRankConvolution):
    """`nn.Conv1d/2d/3d` seen as c_out × (c_in·k·k), a group at a time.

    `down` is the k×k convolution with r filters a group: it keeps stride, padding and dilation, so that a
    strided layer does its second, 1×1 convolution `up` on the smaller image.
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.Conv2d, dense)
        conv, inner = _CONV[dense.weight.dim()], dense.groups * ranks[""]
        where: dict[str, Any] = {"device": "meta", "dtype": dense.weight.dtype, "groups": dense.groups}
        self.down = conv(
            dense.in_channels,
            inner,
            dense.kernel_size,
            stride=dense.stride,
            padding=dense.padding,
            dilation=dense.dilation,
            padding_mode=dense.padding_mode,
            bias=False,
            **where,
        )
        self.up = conv(inner, dense.out_channels, 1, bias=dense.bias is not None, **where)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        dense = cast(nn.Conv2d, dense)
        row = tuple(dense.weight.shape[1:])
        return [
            Matrix(
                name="",
                weight="weight",
                bias=None if dense.bias is None else "bias",
                shape=tuple(dense.weight.shape),
                blocks=dense.groups,
                m=dense.out_channels // dense.groups,
                n=math.prod(row),
                down_row=row,
                up_tail=(1,) * len(row[1:]),
            )
        ]

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.up(self.down(input))
        return output


class LowRankConvTranspose(_LowRankConvolution):
    """`nn.ConvTranspose1d/2d/3d` seen as c_in × (c_out·k·k), a group at a time.

    The mirror image of `LowRankConv`: the 1×1 convolution `down` comes first, where the image is still
    small, and the transposed k×k one, `up`, keeps stride, paddings and dilation.
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.ConvTranspose2d, dense)
        inner, dims = dense.groups * ranks[""], dense.weight.dim()
        where: dict[str, Any] = {"device": "meta", "dtype": dense.weight.dtype, "groups": dense.groups}
        self.down = _CONV[dims](dense.in_channels, inner, 1, bias=False, **where)
        self.up = _TRANSPOSED[dims](
            inner,
            dense.out_channels,
            dense.kernel_size,
            stride=dense.stride,
            padding=dense.padding,
            output_padding=dense.output_padding,
            dilation=dense.dilation,
            padding_mode=dense.padding_mode,
            bias=dense.bias is not None,
            **where,
        )

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        dense = cast(nn.ConvTranspose2d, dense)
        row = tuple(dense.weight.shape[1:])
        n = dense.in_channels // dense.groups
        return [
            Matrix(
                name="",
                weight="weight",
                bias=None if dense.bias is None else "bias",
                shape=tuple(dense.weight.shape),
                blocks=dense.groups,
                m=math.prod(row),
                n=n,
                transposed=True,
                down_row=(n, *(1 for _ in row[1:])),
                up_tail=row,
                up_transposed=True,
            )
        ]

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        input: Tensor = args[0] if args else kwargs["input"]
        return input.numel() // (matrix.blocks * matrix.n)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        output: Tensor = self.up(self.down(input), output_size)
        return output
