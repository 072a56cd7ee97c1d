"""`Matrix` and `FactorMap`: what the parameters of dense layers become, and their tensors there and back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pufferfish.layers import FactorMap, Matrix

small = st.integers(1, 4)


@st.composite
def layers(draw):
    """Several matrices of one layer, each a block of rows of the same weight and bias, in one of the three layouts."""
    m, n, kernel = draw(small), draw(small), draw(st.lists(small, max_size=2))
    size, count = torch.Size(kernel).numel(), draw(st.integers(1, 3))
    layout = draw(st.sampled_from(["convolution", "transposed convolution", "interleaved experts"]))
    blocks = 1 if layout == "transposed convolution" else draw(small)  # all its bias is that of one matrix
    matrices = []
    for i in range(count):
        name = "qkv"[i]
        fields = {
            "name": name,
            "weight": "weight",
            "bias": "bias",
            "dense": f"{name}.weight",
            "blocks": blocks,
        }
        match layout:
            case "convolution":
                fields |= {"shape": (blocks * m, n, *kernel), "m": m, "n": n * size, "down_row": (n, *kernel)}
                fields |= {
                    "up_tail": (1,) * len(kernel),
                    "start": i * blocks * m,
                    "bias_start": i * blocks * m,
                }
            case "transposed convolution":
                fields |= {"shape": (n, m, *kernel), "m": m * size, "n": n, "up_tail": (m, *kernel)}
                fields |= {"down_row": (n, *(1 for _ in kernel)), "transposed": True, "up_transposed": True}
                fields |= {"start": i * n, "bias_start": i * m}
            case "interleaved experts":
                fields |= {"shape": (blocks, m, n), "m": m, "n": n, "routed": True, "dim": 1}
                fields |= {"start": i, "step": count, "bias_start": i}
        rank = draw(st.none() | small)
        matrices.append(("layer", Matrix(**fields), rank))
    return matrices


@settings(deadline=None, max_examples=50)
@given(matrices=layers())
def test_split_and_join_round_trip(matrices):
    torch.manual_seed(0)
    factor_map = FactorMap(matrices)
    product: dict[str, torch.Tensor] = {}

    def factor(part, W):
        x = part.matrix
        assert W.shape == (x.blocks, x.m, x.n)
        U, V = torch.randn(x.blocks, x.m, part.rank), torch.randn(x.blocks, part.rank, x.n)
        product[part.name] = U @ V
        return U, V

    for name, targets in factor_map.targets.items():
        dense = torch.randn(factor_map.shape(name))
        pieces = dict(factor_map.split(name, dense, factor))
        assert tuple(pieces) == targets
        joined = factor_map.join(
            name, pieces.__getitem__, lambda part, U, V: U @ V, torch.full_like(dense, torch.nan)
        )
        for part in factor_map.parts[name]:
            x = part.matrix
            if part.rank is None:
                assert torch.equal(joined[part.index], dense[part.index])
            else:
                down, up = (pieces[target] for target in part.targets)
                assert down.numel() + up.numel() == x.factor_numel(part.rank)
                torch.testing.assert_close(x.to_matrix(joined), product[part.name])
                torch.testing.assert_close(x.product(down, up), joined[part.index])
        assert not joined.isnan().any()  # the parts cover the parameter
    assert factor_map.replaced.keys() <= factor_map.targets.keys()


def test_to_matrix_by_hand():
    weight = torch.arange(24.0).reshape(4, 3, 2)  # Conv1d(6, 4, 2, groups=2)
    conv = Matrix(name="", weight="weight", shape=(4, 3, 2), blocks=2, m=2, n=6)
    assert conv.to_matrix(weight)[1, 0].tolist() == [12, 13, 14, 15, 16, 17]
    turned = Matrix(name="", weight="weight", shape=(2, 3), m=3, n=2, transposed=True)
    assert turned.to_matrix(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[[1, 4], [2, 5], [3, 6]]]


def test_targets():
    q, k = (
        Matrix(
            name=name, weight="in_proj_weight", start=start, bias="in_proj_bias", bias_start=start,
            dense=f"{name}.weight", shape=(4, 4), m=4, n=4,
        )
        for name, start in (("q", 0), ("k", 4))
    )  # fmt: skip
    attention = FactorMap([("a", q, None), ("a", k, 2)])
    assert attention.targets == {
        "a.in_proj_weight": ("a.q.weight", "a.k.down.weight", "a.k.up.weight"),
        "a.in_proj_bias": ("a.q.bias", "a.k.up.bias"),
    }
    assert attention.replaced == attention.targets
    assert attention.shape("a.in_proj_weight") == (8, 4)
    assert [part.index for part in attention.parts["a.in_proj_bias"]] == [
        (slice(0, 4, 1),),
        (slice(4, 8, 1),),
    ]

    gate = Matrix(name="weight_hh_l0", weight="weight_hh_l0", shape=(8, 2), m=2, n=2, blocks=4)
    assert FactorMap([("", gate, None)]).targets == {"weight_hh_l0": ("weight_hh_l0",)}
    assert FactorMap([("", gate, None)]).replaced == {}
    assert FactorMap([("", gate, 1)]).replaced == {
        "weight_hh_l0": ("weight_hh_l0.down.weight", "weight_hh_l0.up.weight")
    }

    turned = Matrix(
        name="", weight="weight", bias="bias", shape=(6, 4, 3), blocks=2, m=12, n=3, up_tail=(4, 3),
        transposed=True, up_transposed=True,
    )  # fmt: skip
    transposed = FactorMap([("deconv", turned, 3)])
    assert transposed.replaced == {"deconv.weight": ("deconv.down.weight", "deconv.up.weight")}
    assert transposed.targets["deconv.bias"] == ("deconv.up.bias",)
    assert transposed.parts["deconv.bias"][0].index == (slice(0, 8, 1),)  # 2 groups × 4 channels
