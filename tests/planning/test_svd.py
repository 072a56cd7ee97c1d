"""The truncated SVD against torch.linalg.svd in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pufferfish.planning import svd

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def tail(W: Tensor, r: int) -> Tensor:
    """The error of the best approximation of rank r: what the dropped singular values hold."""
    return torch.linalg.svdvals(W.double())[..., r:].square().sum().sqrt()


def check_split(W: Tensor, r: int) -> None:
    U, V, error = svd.split(W, r)
    blocks, m, n = W.shape
    exact = W.dtype == torch.float64
    assert U.shape == (blocks, m, r)
    assert V.shape == (blocks, r, n)
    assert U.dtype == V.dtype == (torch.float64 if exact else torch.float32)
    assert U.is_contiguous()
    assert V.is_contiguous()
    W, U, V = W.double(), U.double(), V.double()
    size, tolerance = float(W.norm()), 1e-11 if exact else 2e-6
    assert float((W - U @ V).norm()) == pytest.approx(float(tail(W, r)), abs=tolerance * size)
    assert error * size == pytest.approx(float(tail(W, r)), abs=2e-7 * size)
    sigma = torch.diag_embed(torch.linalg.svdvals(W)[:, :r])
    torch.testing.assert_close(U.mT @ U, sigma, rtol=0, atol=tolerance * size)
    torch.testing.assert_close(V @ V.mT, sigma, rtol=0, atol=tolerance * size)


@given(
    m=st.integers(1, 24),
    n=st.integers(1, 24),
    blocks=st.integers(1, 3),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_split_is_optimal_and_balanced(
    m: int, n: int, blocks: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    W = torch.randn(blocks, m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    check_split(W, max(1, round(share * min(m, n))))


@pytest.mark.parametrize("shape", [(1, 30, 700), (1, 700, 30), (2, 40, 600)])
def test_split_of_matrices_wider_than_one_chunk(shape: tuple[int, int, int]) -> None:
    check_split(torch.randn(shape), 12)


def test_split_takes_views() -> None:
    W = torch.randn(7, 5, 2).permute(2, 1, 0)
    check_split(W, 3)
    check_split(W.mT, 3)
    assert not any(x.requires_grad for x in svd.split(W.clone().requires_grad_(), 3)[:2])


def test_fast_falling_spectra_keep_their_digits() -> None:
    """Squaring the condition number in the Gram matrix must not cost what fp32 can hold."""
    Q1, Q2 = (torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q for _ in range(2))
    sigma = torch.logspace(0, -6, 40, dtype=torch.float64)
    W = (Q1 * sigma @ Q2)[None].float()
    U, V, error = svd.split(W, 20)
    assert float((W.double() - U.double() @ V.double()).norm()) == pytest.approx(float(tail(W, 20)), rel=1e-2)
    assert error == pytest.approx(float(tail(W, 20) / W.double().norm()), rel=1e-2)
    torch.testing.assert_close(svd.spectrum(W)[:30], sigma[:30], rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 8)])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_deficient_matrices(dtype: torch.dtype, shape: tuple[int, int], rank: int) -> None:
    m, n = shape
    # Small whole numbers: the product is exact in every dtype.
    left, right = torch.randint(-3, 4, (1, m, rank)).float(), torch.randint(-3, 4, (1, rank, n)).float()
    W = (left @ right).to(dtype)
    U, V, error = svd.split(W, 6)
    assert U.isfinite().all()
    assert V.isfinite().all()
    torch.testing.assert_close((U @ V).double(), W.double(), rtol=0, atol=2e-5)
    assert error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8, 12), (1, 12, 8)])
def test_a_zero_matrix_can_still_learn(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    U, V, error = svd.split(torch.zeros(shape, dtype=dtype), 4)
    assert error == 0
    assert (U @ V == 0).all()
    G = torch.randn(shape, dtype=dtype)
    gradients = torch.cat([(G @ V.mT).flatten(), (U.mT @ G).flatten()])
    assert gradients.count_nonzero() > 0


@pytest.mark.parametrize("shape", [(1, 9, 14), (2, 14, 9)])
@pytest.mark.parametrize(("dtype", "solver"), [(torch.float64, "svd"), (torch.float32, "eigh")])
def test_where_one_solver_fails_the_other_serves(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype, solver: str
) -> None:
    W = torch.randn(shape, dtype=dtype)
    failed = []

    def fail(*args: object, **kwargs: object) -> None:
        failed.append(args)
        raise torch.linalg.LinAlgError("the algorithm did not converge")

    monkeypatch.setattr(torch.linalg, solver, fail)
    U, V, error = svd.split(W, 5)
    monkeypatch.undo()
    assert len(failed) == shape[0]
    assert U.dtype == V.dtype == dtype
    rounding = 1e-9 if dtype == torch.float64 else 1e-6
    W, U, V = (x.double() for x in (W, U, V))
    torch.testing.assert_close((W - U @ V).norm(), tail(W, 5), rtol=rounding, atol=0)
    torch.testing.assert_close(error, float(tail(W, 5) / W.norm()), rtol=rounding, atol=0)


@given(m=st.integers(1, 20), n=st.integers(1, 20), dtype=st.sampled_from(DTYPES))
def test_spectrum_is_svdvals(m: int, n: int, dtype: torch.dtype) -> None:
    W = torch.randn(1, m, n).to(dtype)
    sigma = torch.linalg.svdvals(W.double())[0]
    torch.testing.assert_close(svd.spectrum(W), sigma, rtol=1e-6, atol=1e-6 * float(sigma[0]))
