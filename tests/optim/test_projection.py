"""What becomes of moments and squares when a weight becomes two factors, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pufferfish as pf
from optimizers import OPTIMIZERS, Net, plan, train
from pufferfish.lowrank.rewrite import lift, project


def test_momentum_is_projected_by_the_factors() -> None:
    model = Net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, [optimizer], range(3))
    G = optimizer.state[model.fc.weight]["momentum_buffer"].clone()
    gates = optimizer.state[model.gru.weight_ih_l0]["momentum_buffer"].clone().view(3, 16, 24)
    groups = optimizer.state[model.conv.weight]["momentum_buffer"].clone().view(2, 12, 24)
    values = optimizer.state[model.attention.in_proj_weight]["momentum_buffer"][48:].clone()
    bias = optimizer.state[model.attention.in_proj_bias]["momentum_buffer"].clone()
    pf.factorize_(model, plan(model), optimizer)

    def momentum(p: Tensor) -> Tensor:
        return optimizer.state[p]["momentum_buffer"]

    for layer, M in ((model.fc, G), (model.attention.v, values)):
        torch.testing.assert_close(momentum(layer.up.weight), M @ layer.down.weight.T)
        torch.testing.assert_close(momentum(layer.down.weight), layer.up.weight.T @ M)
    assert torch.equal(momentum(model.attention.k.up.bias), bias[24:48])
    ih = model.gru.weight_ih_l0
    for g in range(3):
        V, U = ih.down.weight[4 * g : 4 * g + 4], ih.up.weight[16 * g : 16 * g + 16, :, 0]
        torch.testing.assert_close(momentum(ih.down.weight)[4 * g : 4 * g + 4], U.T @ gates[g])
        torch.testing.assert_close(momentum(ih.up.weight)[16 * g : 16 * g + 16, :, 0], gates[g] @ V.T)
    for g in range(2):
        V, U = model.conv.down.weight[4 * g : 4 * g + 4], model.conv.up.weight[12 * g : 12 * g + 12, :, 0]
        torch.testing.assert_close(
            momentum(model.conv.down.weight)[4 * g : 4 * g + 4].flatten(1), U.T @ groups[g]
        )
        torch.testing.assert_close(
            momentum(model.conv.up.weight)[12 * g : 12 * g + 12, :, 0], groups[g] @ V.flatten(1).T
        )


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    m=st.integers(2, 12), n=st.integers(2, 12), share=st.floats(0, 0.99), blocks=st.integers(1, 3), seed=st.integers(0, 99)
)  # fmt: skip
def test_lift_inverts_project_on_the_tangent_space(
    m: int, n: int, share: float, blocks: int, seed: int
) -> None:
    r = max(1, int(share * min(m, n)))
    U, V = random((blocks, m, r), seed), random((blocks, r, n), seed + 1)
    tangent = random((blocks, m, r), seed + 2) @ V + U @ random((blocks, r, n), seed + 3)
    torch.testing.assert_close(lift("gradient", *project("gradient", tangent, U, V), U, V), tangent)
    # Elsewhere what comes back is the nearest tangent direction.
    M = random((blocks, m, n), seed + 4)
    back = lift("gradient", *project("gradient", M, U, V), U, V)
    torch.testing.assert_close(
        project("gradient", M - back, U, V), (torch.zeros_like(U), torch.zeros_like(V))
    )


def test_squares_are_the_mean_squares_of_projected_noise() -> None:
    """Gradients of independent elements: what an optimizer would have gathered for the factors."""
    U, V = random((1, 6, 3), 0), random((1, 3, 8), 1)
    sizes = random((1, 6, 8), 2).abs() + 0.1
    noise = random((40_000, 6, 8), 3) * sizes
    mU, mV = project("square", sizes.square(), U, V)
    torch.testing.assert_close(mU[0], (noise @ V.mT).square().mean(0), rtol=0.05, atol=0)
    torch.testing.assert_close(mV[0], (U.mT @ noise).square().mean(0), rtol=0.05, atol=0)
    # Normalised gradients stay of size one.
    for projected in project("normalised", random((40_000, 6, 8), 4), U, V):
        torch.testing.assert_close(
            projected.square().mean(0), torch.ones(projected.shape[1:]).double(), rtol=0.05, atol=0
        )


def test_a_constant_square_comes_back() -> None:
    U, V = random((2, 6, 3), 0), random((2, 3, 8), 1)
    M = torch.full((2, 6, 8), 0.7, dtype=torch.float64)
    torch.testing.assert_close(lift("square", *project("square", M, U, V), U, V), M)


@pytest.mark.parametrize("kind", ["gradient", "square", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_of_size_zero(kind: str, dtype: torch.dtype) -> None:
    """A zero column of U, a zero row of V (or both): finite there and back."""
    U, V = random((1, 6, 3), 0).to(dtype), random((1, 3, 8), 1).to(dtype)
    U[:, :, 1] = 0
    V[:, 2] = 0
    M = random((1, 6, 8), 2).to(dtype).abs()
    for factors in ((U, V), (U * 0, V * 0)):
        pair = project(kind, M, *factors)
        assert all(x.isfinite().all() for x in pair)
        assert lift(kind, *pair, *factors).isfinite().all()


def test_states_of_fp64_models_keep_their_digits() -> None:
    model = Net().double()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, [optimizer], range(3))
    G = optimizer.state[model.fc.weight]["exp_avg"].clone()
    pf.factorize_(model, plan(model), optimizer)
    projected = optimizer.state[model.fc.up.weight]["exp_avg"]
    torch.testing.assert_close(projected, G @ model.fc.down.weight.T, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad"])
def test_states_keep_their_dtype(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    optimizer = OPTIMIZERS[name](model.parameters())

    def step() -> None:
        model(torch.randn(2, 64, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()

    step()
    kept = {k: v.dtype for k, v in optimizer.state[model[0].weight].items() if isinstance(v, Tensor)}
    assert torch.bfloat16 in kept.values()
    for change in (
        lambda: pf.factorize_(model, pf.plan(model), optimizer),
        lambda: pf.merge_(model, optimizer),
    ):
        change()
        for p in model.parameters():
            assert {k: v.dtype for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} == kept
        step()
