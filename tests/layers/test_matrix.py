"""`Matrix`: where a weight lies in its parameter, and where the factors go."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pufferfish.layers import Matrix

small = st.integers(1, 4)


@st.composite
def matrices(draw):
    """One of the three ways in which the layers lay out their weights and factors, at any size."""
    blocks, m, n, kernel = draw(small), draw(small), draw(small), draw(st.lists(small, max_size=2))
    size = torch.Size(kernel).numel()
    where = {"name": draw(st.sampled_from(["", "q"])), "weight": "weight", "start": draw(st.integers(0, 3))}
    match draw(st.sampled_from(["convolution", "transposed convolution", "transposed linear"])):
        case "convolution":
            shape, row = (blocks * m, n, *kernel), (n, *kernel)
            layout = {"n": n * size, "m": m, "down_row": row, "up_tail": (1,) * len(kernel)}
        case "transposed convolution":
            shape, row = (blocks * n, m, *kernel), (m, *kernel)
            layout = {"n": n, "m": m * size, "down_row": (n, *(1 for _ in kernel)), "up_tail": row}
            layout |= {"transposed": True, "up_transposed": True}
        case "transposed linear":
            blocks, shape = 1, (n, m)
            layout = {"n": n, "m": m, "down_row": (n,), "transposed": True}
    return Matrix(shape=shape, blocks=blocks, **where, **layout)


@settings(deadline=None, max_examples=25)
@given(x=matrices(), r=small)
def test_conversions_round_trip(x, r):
    torch.manual_seed(0)
    parameter = torch.randn(x.start + x.shape[0] + 2, *x.shape[1:])  # others' rows before and behind ours
    W = x.to_matrix(parameter)
    assert W.shape == (x.blocks, x.m, x.n)
    assert torch.equal(x.from_matrix(W), parameter[x.index])

    U, V = torch.randn(x.blocks, x.m, r), torch.randn(x.blocks, r, x.n)
    down, up = x.from_factors(U, V)
    assert down.shape == (x.blocks * r, *x.down_row)
    assert down.numel() + up.numel() == x.factor_numel(r)
    assert all(torch.equal(a, b) for a, b in zip(x.to_factors(down, up), (U, V), strict=True))
    torch.testing.assert_close(x.product(down, up), x.from_matrix(U @ V))
    torch.testing.assert_close(x.product_fp32(down, up), U @ V)
    assert x.numel == W.numel()


def test_to_matrix_by_hand():
    weight = torch.arange(24.0).reshape(4, 3, 2)  # Conv1d(6, 4, 2, groups=2)
    conv = Matrix(name="", weight="weight", shape=(4, 3, 2), blocks=2, m=2, n=6)
    assert conv.to_matrix(weight)[1, 0].tolist() == [12, 13, 14, 15, 16, 17]
    turned = Matrix(name="", weight="weight", shape=(2, 3), m=3, n=2, transposed=True)
    assert turned.to_matrix(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[[1, 4], [2, 5], [3, 6]]]


def test_copied_slices():
    k = Matrix(
        name="k", weight="in_proj_weight", start=4, bias="in_proj_bias", bias_start=4, dense="k.weight",
        shape=(4, 4), m=4, n=4,
    )  # fmt: skip
    assert k.copied_slices(factorized=True) == [("in_proj_bias", (slice(4, 8, 1),), "k.up.bias")]
    assert k.copied_slices(factorized=False) == [
        ("in_proj_weight", (slice(4, 8, 1),), "k.weight"),
        ("in_proj_bias", (slice(4, 8, 1),), "k.bias"),
    ]
    gate = Matrix(name="weight_hh_l0", weight="weight_hh_l0", shape=(8, 2), m=2, n=2, blocks=4)
    assert gate.copied_slices(factorized=True) == []
    assert gate.copied_slices(factorized=False) == [("weight_hh_l0", (slice(0, 8, 1),), "weight_hh_l0")]
    turned = Matrix(
        name="", weight="weight", bias="bias", shape=(6, 4, 3), blocks=2, m=12, n=3, up_tail=(4, 3),
        transposed=True, up_transposed=True,
    )  # fmt: skip
    assert turned.copied_slices(factorized=True) == [
        ("bias", (slice(0, 8, 1),), "up.bias")
    ]  # 2 groups × 4 channels
