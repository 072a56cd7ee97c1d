"""The base, and a layer type of one's own in a few lines."""

import copy
import dataclasses

import pytest
import torch
from reference import factorized
from torch import nn

import pufferfish as pf
from matrices import forced
from pufferfish.layers import LowRank, LowRankConv1D, LowRankLinear, Matrix, base, low_rank_type


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is forgotten behind it."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


class Subclass(nn.Linear):
    pass


class Doubled(nn.Linear):
    """Computes something else than its base class."""

    def forward(self, input):
        return 2 * super().forward(input)


class LowRankDoubled(LowRankLinear):
    def forward(self, input):
        return 2 * super().forward(input)


class Pointwise(nn.Module):
    """A layer of one's own: channels first, the weight stored the other way round, no nn.Linear inside."""

    def __init__(self, n, m):
        super().__init__()
        self.kernel, self.scale = nn.Parameter(torch.randn(n, m)), nn.Parameter(torch.rand(m, 1) + 1)

    def forward(self, x):
        return self.scale * torch.einsum("bnt,nm->bmt", x, self.kernel)


class LowRankPointwise(LowRank):
    def __init__(self, dense, ranks):
        super().__init__(dense, ranks)
        n, m = dense.kernel.shape
        self.down = nn.Linear(n, ranks[""], bias=False, device="meta")
        self.up = nn.Linear(ranks[""], m, bias=False, device="meta")
        self.scale = nn.Parameter(dense.scale.detach().to("meta"))

    @classmethod
    def matrices(cls, dense):
        n, m = dense.kernel.shape
        return [Matrix(name="", weight="kernel", shape=(n, m), m=m, n=n, down_row=(n,), transposed=True)]

    def forward(self, x):
        return self.scale * self.up(self.down(x.mT)).mT


def test_types_match_exactly():
    assert low_rank_type(nn.Linear) is LowRankLinear
    assert low_rank_type(Subclass) is None
    assert low_rank_type(nn.EmbeddingBag) is None
    assert low_rank_type(nn.LazyLinear) is None
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert low_rank_type(conv1d) is LowRankConv1D


@pytest.mark.parametrize("by_name", [False, True])
def test_register(by_name):
    pf.register(f"{__name__}.Doubled" if by_name else Doubled, LowRankDoubled)
    assert low_rank_type(Doubled) is LowRankDoubled
    assert low_rank_type(Subclass) is None
    dense = Doubled(5, 4)
    low_rank = factorized(dense, 4)
    x = torch.randn(3, 5)
    assert type(low_rank) is LowRankDoubled
    torch.testing.assert_close(low_rank(x), dense(x))


@pytest.mark.parametrize(
    ("dense", "low_rank"),
    [(nn.Linear, nn.Linear), (nn.Linear, None), (nn.Linear, LowRankLinear(nn.Linear(4, 4), {"": 2}))]
    + [(nn.Linear(4, 4), LowRankLinear), (int, LowRankLinear), (None, LowRankLinear)],
)
def test_nonsense_is_refused(dense, low_rank):
    before = dict(base._REGISTRY)
    with pytest.raises(TypeError, match="register: "):
        pf.register(dense, low_rank)
    assert before == base._REGISTRY


@pytest.mark.parametrize(
    ("built", "listed", "parameter"),
    [
        ({}, {"down_row": ()}, "down.weight"),
        ({}, {"down_row": (7,)}, "kernel"),
        ({}, {"name": "inner"}, "inner.down.weight"),
        ({"up": nn.Linear(3, 4, bias=False)}, {}, "up.weight"),
        ({"up": nn.Linear(3, 5)}, {}, "up.bias"),
        ({"up": None}, {}, "up.weight"),
    ],
)
def test_factors_that_do_not_fit_the_matrices_are_refused(built, listed, parameter):
    class Wrong(LowRankPointwise):
        def __init__(self, dense, ranks):
            super().__init__(dense, {"": 3} | ranks)
            self.ranks = ranks
            for name, child in built.items():
                setattr(self, name, child)

        @classmethod
        def matrices(cls, dense):
            return [dataclasses.replace(super().matrices(dense)[0], **listed)]

    pf.register(Pointwise, Wrong)
    model = nn.Sequential(Pointwise(6, 5))
    with pytest.raises(ValueError, match=rf"^0: .*{parameter}"):
        pf.factorize_(model, forced(model, rank=3))
    assert type(model[0]) is Pointwise


def test_a_layer_of_ones_own():
    pf.register(Pointwise, LowRankPointwise)
    torch.manual_seed(0)
    model = nn.Sequential(Pointwise(6, 5), nn.ReLU(), Pointwise(5, 7))
    dense, x = copy.deepcopy(model), torch.randn(2, 6, 3)
    done = pf.factorize_(model, forced(model, rank=3, overrides={"0": 5}))
    assert [type(layer) for layer in model] == [LowRankPointwise, nn.ReLU, LowRankPointwise]
    assert list(model.state_dict()) == [
        "0.scale",
        "0.down.weight",
        "0.up.weight",
        "2.scale",
        "2.down.weight",
        "2.up.weight",
    ]
    assert done["0"].error < 1e-5 < done["2"].error
    torch.testing.assert_close(model[0](x), dense[0](x))  # rank 5 is the full one

    before = model(x)
    model[2].down.weight.data.mul_(3)
    tripled = model(x)
    torch.testing.assert_close(tripled, 3 * before)
    pf.merge_(model)
    assert [type(layer) for layer in model] == [Pointwise, nn.ReLU, Pointwise]
    torch.testing.assert_close(model(x), tripled)
