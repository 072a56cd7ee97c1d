"""Low-rank convolutions: a k×k convolution with few filters, then a 1×1 convolution; transposed in reverse order."""

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from .base import LowRankSingle, register
from .matrix import Matrix

# By the number of dimensions of the weight.
_CONV: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_TRANSPOSED: dict[int, Any] = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d, 5: nn.ConvTranspose3d}
_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


def _matrix(dense: nn.Conv2d | nn.ConvTranspose2d, **layout: Any) -> Matrix:
    bias, shape = None if dense.bias is None else "bias", tuple(dense.weight.shape)
    return Matrix(name="", weight="weight", bias=bias, shape=shape, blocks=dense.groups, **layout)


class LowRankConv(LowRankSingle):
    """Low-rank `nn.Conv1d/2d/3d`. The weight of each group is a matrix of c_out × (c_in·k·k).

    `down` is a k×k convolution with r filters per group. It has the dense layer's stride, padding and
    dilation, so the 1×1 convolution `up` of a strided layer runs on the smaller image.
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.Conv2d, dense)
        conv, inner = _CONV[dense.weight.dim()], dense.groups * ranks[""]
        options: dict[str, Any] = {"device": "meta", "dtype": dense.weight.dtype, "groups": dense.groups}
        geometry = {name: getattr(dense, name) for name in _GEOMETRY}
        self.down = conv(dense.in_channels, inner, bias=False, **geometry, **options)
        self.up = conv(inner, dense.out_channels, 1, bias=dense.bias is not None, **options)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        dense = cast(nn.Conv2d, dense)
        row = tuple(dense.weight.shape[1:])
        m, ones = dense.out_channels // dense.groups, (1,) * len(row[1:])
        return [_matrix(dense, m=m, n=math.prod(row), down_row=row, up_tail=ones)]


class LowRankConvTranspose(LowRankSingle):
    """Low-rank `nn.ConvTranspose1d/2d/3d`. The weight of each group is a matrix of c_in × (c_out·k·k).

    `down` is a 1×1 convolution, which runs on the smaller image. `up` is a transposed k×k convolution with
    the dense layer's stride, paddings and dilation.
    """

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.ConvTranspose2d, dense)
        inner, dims = dense.groups * ranks[""], dense.weight.dim()
        options: dict[str, Any] = {"device": "meta", "dtype": dense.weight.dtype, "groups": dense.groups}
        self.down = _CONV[dims](dense.in_channels, inner, 1, bias=False, **options)
        options |= {name: getattr(dense, name) for name in (*_GEOMETRY, "output_padding")}
        self.up = _TRANSPOSED[dims](inner, dense.out_channels, bias=dense.bias is not None, **options)

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        dense = cast(nn.ConvTranspose2d, dense)
        row = tuple(dense.weight.shape[1:])
        n, ones = dense.in_channels // dense.groups, (1,) * len(row[1:])
        layout = {"down_row": (n, *ones), "up_tail": row, "transposed": True, "up_transposed": True}
        return [_matrix(dense, m=math.prod(row), n=n, **layout)]

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        input: Tensor = args[0] if args else kwargs["input"]
        return input.numel() // (matrix.blocks * matrix.n)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return cast(Tensor, self.up(self.down(input), output_size))


for _dense in _CONV.values():
    register(_dense, LowRankConv)
for _dense in _TRANSPOSED.values():
    register(_dense, LowRankConvTranspose)
