"""Rank rules: what a user may pass, alignment, rules that look at the weights."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pufferfish as pf
from matrices import linear_with, matrix
from pufferfish.layers import Matrix
from pufferfish.planning import Plan
from pufferfish.planning.rules import Rule, align, largest_rank, stable_rank

# What a user may pass.


@pytest.mark.parametrize(
    ("rank", "error", "hint"),
    [
        (True, TypeError, r"an int ≥ 1 or a rule"),
        (False, TypeError, r"a float in \(0, 1\)"),
        ("x", TypeError, r"pf\.Energy"),
        (None, TypeError, r"a float in \(0, 1\)"),
        *((x, ValueError, r"share of the full rank is a float in \(0, 1\)") for x in (1.0, 2.5, 0.0, -0.25)),
        *((x, ValueError, r"a fixed rank an int ≥ 1$") for x in (0, -1, 2.0, 1e300)),
        *((x, ValueError, r"share of the full rank") for x in (float("nan"), float("inf"))),
    ],
)
def test_other_ranks_raise_with_a_hint(rank: Any, error: type[Exception], hint: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(error, match=hint):
        pf.plan(model, rank=rank)
    with pytest.raises(error, match=hint):
        pf.plan(model, overrides={"0": rank})


@pytest.mark.parametrize(
    "make",
    [
        lambda: pf.Ratio(1.0),
        lambda: pf.Ratio(0),
        lambda: pf.Fixed(0),
        lambda: pf.Fixed(True),
        lambda: pf.Fixed(2.0),  # type: ignore[arg-type]
        lambda: pf.Energy(1.5),
        lambda: pf.Energy(0.0),
        lambda: pf.Budget(),
        lambda: pf.Budget(params=1e6, bytes=1e6),
        lambda: pf.Budget(macs=0),
        lambda: pf.Budget(params=float("nan")),
        lambda: pf.Budget(macs=math.inf),
        lambda: pf.Ratio(math.nan),
        lambda: pf.StableRank({"fc": math.nan}),
        lambda: pf.StableRank({"fc": math.inf}),
        lambda: pf.StableRank(at_most=0),
        lambda: pf.StableRank(at_most=1.1),
        lambda: pf.StableRank(at_most=math.nan),
    ],
)
def test_rules_check_their_settings(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


# Alignment.


def ranks_that_save(x: Matrix, multiple: int) -> list[int]:
    """All ranks one may choose: multiples that save weights, one by one."""
    return [r for r in range(multiple, x.full_rank + 1, multiple) if r * (x.m + x.n) < x.m * x.n]


sides = st.integers(1, 90)


@given(m=sides, n=sides, multiple=st.sampled_from([1, 2, 8, 16]), r=st.integers(0, 100))
def test_align_takes_the_next_multiple_or_the_largest_that_saves(
    m: int, n: int, multiple: int, r: int
) -> None:
    x = matrix(m, n)
    allowed = ranks_that_save(x, multiple)
    above = [a for a in allowed if a >= r]
    assert align(r, x, multiple) == (above[0] if above else allowed[-1] if allowed else 0)
    assert largest_rank(x) == max(ranks_that_save(x, 1), default=0)


def test_fixed_is_never_aligned_nor_bent() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(16, 16))
    assert [e.rank for e in pf.plan(model, 7)] == [7, 7]
    assert [e.rank for e in pf.plan(model, 37)] == [37, None]
    assert "not smaller at rank 37: the largest that saves is 7" in pf.plan(model, 37)["1"].reason
    assert [e.rank for e in pf.plan(model, 50)] == [None, None]  # 50 × 200 = 100 × 100: saves nothing
    assert [e.rank for e in pf.plan(model, 49)] == [49, None]


@pytest.mark.parametrize("options", [{}, {"overrides": {"0": pf.Ratio(0.25, multiple=0)}}])
def test_multiples_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="multiple=0"):
        pf.plan(nn.Sequential(nn.Linear(64, 64)), **{"rank": pf.Ratio(0.25, multiple=0)} | options)


# Rules that look at the weights.


@given(sigma=st.lists(st.floats(0.01, 10), min_size=1, max_size=30), keep=st.floats(0.01, 0.99))
def test_energy(sigma: list[float], keep: float) -> None:
    sigma = sorted(sigma, reverse=True)
    total = math.fsum(s * s for s in sigma)
    r = pf.Energy(keep).rank(matrix(30, 30), "", torch.tensor(sigma, dtype=torch.float64))
    assert math.fsum(s * s for s in sigma[:r]) >= keep * total * (1 - 1e-12)
    assert math.fsum(s * s for s in sigma[: r - 1]) < keep * total * (1 + 1e-12)


def test_energy_in_a_plan_decides_when_resolved() -> None:
    sigma = torch.tensor([2.0] * 5 + [0.5] * 5, dtype=torch.float64)
    model = nn.Sequential(linear_with(sigma, 32, 48))
    plan = pf.plan(model, pf.Energy(0.6, multiple=1))
    assert plan["0"].rank is None
    assert not plan.resolved
    assert plan.after == plan.before
    resolved = pf.resolve(plan, model)
    assert resolved["0"].rank == 4  # 4 × 4 of 21.25
    assert resolved.resolved
    assert resolved.after.parameters == 4 * (32 + 48)
    assert pf.resolve(resolved, model) is resolved


def test_stable_rank_with_spectra_from_the_start() -> None:
    start = torch.tensor([3.0] * 10 + [1.0] * 10, dtype=torch.float64)
    now = torch.tensor([5.0] + [1.0] * 19, dtype=torch.float64)
    model = nn.Sequential(linear_with(start, 20, 60))
    initial = pf.planning.spectra(model)
    model[0] = linear_with(now, 20, 60)
    plan = pf.plan(model, pf.StableRank(initial, multiple=1))
    assert plan["0"].note == ""
    assert "assumed" not in str(plan)
    s_start, s_now = (90 + 10) / 9, (25 + 19) / 25
    assert pf.resolve(plan, model)["0"].rank == math.ceil(20 / s_start * s_now)
    # The stable ranks themselves do as well, and the plan keeps no more than those.
    assert pf.StableRank({"0": s_start}).initial == pytest.approx(pf.StableRank(initial).initial)


def test_stable_rank_of_an_unknown_layer_raises() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"no spectrum of '0'; compute it with pf\.planning\.spectra"):
        pf.plan(model, pf.StableRank({"1": 3.0}))


@pytest.mark.parametrize(("m", "n"), [(256, 256), (128, 768), (768, 128)])
def test_assumed_stable_rank_is_close_to_a_random_matrix(m: int, n: int) -> None:
    closed = m * n / (math.sqrt(m) + math.sqrt(n)) ** 2
    sigma = torch.linalg.svdvals(torch.randn(m, n))
    assert stable_rank(sigma) == pytest.approx(closed, rel=0.06)
    # So at initialisation the rule gives about the full rank.
    assert pf.StableRank().rank(matrix(m, n), "", sigma) == pytest.approx(min(m, n), rel=0.06)


def test_assumed_stable_rank_says_so() -> None:
    model = nn.Sequential(linear_with(torch.linspace(1, 0.1, 64, dtype=torch.float64) ** 2, 64, 64))
    plan = pf.plan(model, pf.StableRank())
    assert "ξ assumed" in str(plan)
    resolved = pf.resolve(plan, model)
    assert resolved["0"].rank
    assert "ξ assumed" in str(resolved)


def test_stable_rank_of_a_layer_that_started_at_zero_is_assumed() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    nn.init.zeros_(model[0].weight)
    initial = pf.planning.spectra(model)
    nn.init.normal_(model[0].weight)
    plan = pf.plan(model, pf.StableRank(initial))
    assert plan["0"].note == "ξ assumed"
    assert pf.resolve(plan, model).hash == pf.resolve(pf.plan(model, pf.StableRank()), model).hash


decays = st.sampled_from([0.0, 0.001, 0.1, 1.0])  # of the logarithm of singular values: from flat to steep


@given(
    layers=st.lists(st.tuples(st.integers(4, 60), st.integers(4, 60), decays), min_size=1, max_size=5),
    share=st.sampled_from([0.25, 0.5, 0.8, 1.0]),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_stable_ranks_together_keep_at_most_a_share(
    layers: list[tuple[int, int, float]], share: float, multiple: int
) -> None:
    model = nn.Sequential(
        *(linear_with(torch.exp(-decay * torch.arange(min(m, n)).double()), m, n) for m, n, decay in layers)
    )
    plain, limited = (
        pf.resolve(pf.plan(model, pf.StableRank(at_most=most, multiple=multiple)), model)
        for most in (1.0, share)
    )
    chosen = [e for e in plain if e.rank]
    if sum(e.after for e in chosen) <= share * sum(e.before for e in chosen):
        assert limited == plain
        return
    for e, (m, n, _) in zip(plain, layers, strict=True):
        rank, now = e.rank or 0, limited[e.name]
        half = share * m * n / (m + n)
        rounded = next(r for r in range(multiple, 1000, multiple) if r > half - 1)  # int(half), rounded up
        assert (now.rank or 0) == min(rank, rounded)
        assert now.asked == e.rank
    assert Plan.from_json(limited.to_json()) == limited


def test_zero_weights_get_the_smallest_rank() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    nn.init.zeros_(model[0].weight)
    for kind in (pf.Energy, pf.StableRank):
        assert pf.resolve(pf.plan(model, kind()), model)["0"].rank == 16
        assert pf.resolve(pf.plan(model, kind(multiple=1)), model)["0"].rank == 1


def test_spectra_are_svdvals_by_entry() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 5), nn.Conv2d(4, 6, 3, groups=2))
    found = pf.planning.spectra(model)
    assert list(found) == ["0", "1.weight_ih_l0", "1.weight_hh_l0", "2"]
    gates = model[1].weight_ih_l0.detach().double().view(4, 5, 4)
    blocks = model[2].weight.detach().double().view(2, 3, 18)
    torch.testing.assert_close(found["0"], torch.linalg.svdvals(model[0].weight.detach().double()))
    for name, W in (("1.weight_ih_l0", gates), ("2", blocks)):
        torch.testing.assert_close(found[name], torch.linalg.svdvals(W).square().mean(0).sqrt())


def test_own_rule() -> None:
    class Third(Rule):
        def rank(self, matrix: Matrix, name: str, spectrum: Tensor | None) -> int:
            return matrix.full_rank // 3

    try:
        plan = pf.plan(nn.Sequential(nn.Linear(90, 90)), Third(multiple=1))
        assert plan["0"].rank == 30
        waiting = plan.replace(dataclasses.replace(e, rank=None, rule=Third(multiple=4)) for e in plan)
        assert pf.Plan.from_json(waiting.to_json()) == waiting
    finally:
        del Rule._known["Third"]
