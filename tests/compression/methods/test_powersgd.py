"""PowerSGD and AlternatingPowerSGD, and their orthonormal rows."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression import (
    AlternatingPowerSGD,
    Engine,
    Method,
    NoCompression,
    PowerSGD,
    Settings,
    Simulated,
    StepContext,
)
from pufferfish.compression.check_compressor import gradients
from pufferfish.compression.methods.powersgd import orthonormal_rows


def off(x: Tensor) -> float:
    """Distance of the rows from orthonormal ones."""
    return float((x.double() @ x.double().mT - torch.eye(x.shape[1])).abs().max())


@pytest.mark.parametrize("shape", [(3, 4, 500), (1, 1, 7), (2, 8, 9), (5, 32, 64)])
def test_the_span_is_that_of_a_qr(shape: tuple[int, int, int]) -> None:
    rows = normal(*shape, workers=1)[0] * torch.logspace(-12, 12, shape[1])[:, None]
    x = orthonormal_rows(rows)
    assert off(x) < 1e-5
    Q = torch.linalg.qr(rows.double().mT).Q
    torch.testing.assert_close(x.double().mT @ x.double(), Q @ Q.mT, atol=2e-5, rtol=0)


def test_zero_and_dependent_rows_become_random_ones() -> None:
    for step in range(50):
        a, b = normal(1, 9, workers=2, seed=step)
        rows = torch.stack([torch.cat([a, 0 * a, b]), torch.cat([a, 3 * a, -a]), torch.zeros(3, 9)])
        x = orthonormal_rows(rows, step)
        assert x.isfinite().all()
        sizes = torch.linalg.svdvals(x.double())
        assert (sizes <= 1 + 1e-6).all()  # never longer: it must be a contraction
        assert (sizes > 0.3).all()
        left = rows - rows @ x.mT @ x
        assert (left.norm(dim=2) <= 1e-5 * rows.norm(dim=2)).all()  # the rows are in the span


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e20, 1e38])
def test_any_scale(size: float) -> None:
    """From the smallest number in fp32 to the largest, beside ordinary rows."""
    rows = normal(1, 3, 40, workers=1)[0].clamp(-3, 3)
    rows[0, 1] = rows[0, 1].sign() * size
    x = orthonormal_rows(rows)
    assert off(x) < 1e-5
    left = rows.double() - rows.double() @ x.double().mT @ x.double()
    assert (left.norm(dim=2) <= 1e-5 * rows.double().norm(dim=2)).all()


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((600, 512), torch.contiguous_format),
        ((200, 1024), torch.contiguous_format),
        ((3, 2**17), torch.contiguous_format),
        ((512, 20, 5, 6), torch.channels_last),
    ],
)
def test_large_matrices_are_the_papers_equations(
    shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    """More rows than a block has, rows that are left over, few long rows, and another order of elements."""
    g, r = {name: normal(*shape, workers=1, seed=i)[0] for i, name in enumerate("ab")}, 2
    engine = Engine(Settings(PowerSGD(r)))
    done = engine.average({name: x.contiguous(memory_format=memory_format) for name, x in g.items()})
    rng = StepContext(0, 1, 0, ("a", "b")).shared_rng
    for (name, x), Q in zip(
        g.items(), torch.randn(2, x0 := g["a"][0].numel(), r, generator=rng), strict=True
    ):
        M = x.reshape(-1, x0).double()
        P = torch.linalg.qr(M @ Q.double()).Q
        torch.testing.assert_close(done[name].double(), (P @ P.T @ M).view(shape), atol=1e-4, rtol=1e-4)
        rest = engine.state_dict()["own"][name]["error"].double()
        torch.testing.assert_close(rest, (M - P @ P.T @ M).view(shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", [PowerSGD(2), AlternatingPowerSGD(2)], ids=repr)
def test_factors_of_bf16_gradients_are_sent_in_bf16(method: Method) -> None:
    """Half of the bytes, for results that differ by rounding."""
    given = [{"w": x.bfloat16()} for x in normal(40, 30, workers=2)]
    both = []
    for dtype in (torch.float32, torch.bfloat16):
        simulated = Simulated(Settings(method, smallest=0), 2)
        results = [simulated.average([{"w": g["w"].to(dtype)} for g in given])[0]["w"] for _ in range(4)]
        flags = 4 * 2 * 4  # finite and used, in each step
        both.append((simulated.meter.collective_bytes["all_reduce"] - flags, torch.stack(results).float()))
    (wide_bytes, wide), (narrow_bytes, narrow) = both
    assert wide_bytes == 2 * narrow_bytes
    assert (wide - narrow).norm() < 2e-2 * wide.norm()


@pytest.mark.parametrize(("b", "m", "n"), [(2, 7, 5), (3, 200, 300)])  # the large ones two and one at a time
def test_alternating_is_the_equations(b: int, m: int, n: int) -> None:
    r, workers = 2, 3
    states: list[State] = [{} for _ in range(workers)]
    for step in range(4):
        xs = normal(b, m, n, workers=workers, seed=step)
        before = {key: x.clone() for key, x in states[0].items()}
        mean, rests, meter = drive(AlternatingPowerSGD(rank=r), xs, states, step)
        for i in range(b):
            Ms = [x[i].double() for x in xs]
            average = sum(Ms) / workers
            if step == 0:  # whatever Q it drew spans the rows of what it applies
                basis = torch.linalg.svd(mean[i].double()).Vh[:r]
                right = [M @ basis.T @ basis for M in [average, *Ms]]
            elif step % 2 == 0:
                Q = torch.linalg.qr(before["Q"][i].double()).Q
                right = [M @ Q @ Q.T for M in [average, *Ms]]
            else:
                P = torch.linalg.qr(before["P"][i].double()).Q
                right = [P @ P.T @ M for M in [average, *Ms]]
            torch.testing.assert_close(mean[i].double(), right[0], atol=1e-5, rtol=1e-4)
            for M, own, rest in zip(Ms, right[1:], rests, strict=True):
                torch.testing.assert_close(rest[i].double(), M - own, atol=1e-5, rtol=1e-4)
        assert meter.messages == 1
        assert meter.collective_bytes["all_reduce"] == b * 4 * r * (m if step % 2 == 0 else n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_equals_a_change_of_method_also_in_a_resumed_job(dtype: torch.dtype) -> None:
    """Nothing is held back before `start`; a job resumes before, at and after it."""
    method = PowerSGD(2, start=3)
    changed, here = (Simulated(Settings(m, smallest=0), 2) for m in (NoCompression(), method))
    for step in range(6):
        if step == method.start:
            changed.use(Settings(PowerSGD(2), smallest=0))
        resumed = Simulated(Settings(method, smallest=0), 2)
        resumed.load_state_dict(here.state_dict())
        given = [{name: x.to(dtype) for name, x in g.items()} for g in gradients(2, step)]
        expected = changed.average(given)[0]
        for means in (here.average(given)[0], resumed.average(given)[0]):
            assert all(torch.equal(means[name], x) for name, x in expected.items()), step
        assert here.meter.collective_bytes == changed.meter.collective_bytes
        held = here.engines[0].state.errors().values()
        assert any(bool(x.any()) for x in held) == (step >= method.start)


def test_error_feedback_of_another_method_is_sent_before_start() -> None:
    method = Simulated(Settings(PowerSGD(1), smallest=0), 2)
    given = [{"w": g["a.weight"]} for g in gradients(2)]
    first = method.average(given)[0]["w"]
    method.use(Settings(PowerSGD(2, start=2), smallest=0))
    second = method.average(given)[0]["w"]
    torch.testing.assert_close(first + second, given[0]["w"] + given[1]["w"])
