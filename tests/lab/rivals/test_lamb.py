"""LAMB against its formula, tensor by tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optimizer_checks
import pytest
import torch
from optimizer_checks import give_gradients, parameters
from torch import Tensor, nn

from pufferfish.lab.rivals import LAMB

Kept = dict[int, tuple[int, Tensor, Tensor]]


def reference(params: list[Tensor], kept: Kept, group: dict[str, Any]) -> None:
    """One step."""
    beta1, beta2 = group["betas"]
    for i, p in enumerate(params):
        g = p.grad
        if g is None:
            continue
        t, m, v = kept.get(i, (0, torch.zeros_like(g), torch.zeros_like(g)))
        t, m, v = t + 1, beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        kept[i] = t, m, v
        r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        ratio = 1.0
        if p.dim() > 1 or not group["exclude_vectors"]:
            r = r + group["weight_decay"] * p.detach()
            w, size = float(p.detach().norm()), float(r.norm())
            ratio = w / size if w and size else 1.0
        p.data -= float(group["lr"]) * ratio * r


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.3},
        {"weight_decay": 0.1, "exclude_vectors": False, "betas": (0.8, 0.95), "eps": 0.1},
    ],
)
def test_equals_the_formula(
    dtype: torch.dtype, foreach: bool | None, capturable: bool, settings: dict[str, Any]
) -> None:
    make = partial(LAMB, lr=0.1, foreach=foreach, capturable=capturable, **settings)
    optimizer_checks.equals_a_formula(make, reference, {"weight_decay": 0.01, "lr": 0.03}, dtype)


def test_zero_norms_have_ratio_one() -> None:
    empty, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    empty.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    LAMB([empty, still], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(empty.detach(), torch.full((2, 2), -0.5))
    assert torch.equal(still, torch.ones(2, 2))


def test_rate_in_a_tensor_is_read_at_every_step() -> None:
    one, other = parameters(torch.float64), parameters(torch.float64)
    lr = torch.tensor(0.1)
    with_tensor, with_number = LAMB(one, lr=lr, foreach=True), LAMB(other, lr=0.1)
    for step, rate in enumerate((0.1, 0.04, 0.025)):
        give_gradients(one, step)
        give_gradients(other, step)
        lr.fill_(rate)
        with_number.param_groups[0]["lr"] = float(lr)
        with_tensor.step()
        with_number.step()
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_never_waits_for_the_device() -> None:
    optimizer_checks.does_not_wait(lambda params: LAMB(params, lr=torch.tensor(1.0), capturable=True))


def make(model: nn.Module) -> LAMB:
    return LAMB(model.parameters(), lr=0.03)


def test_follows_a_switch_and_back() -> None:
    optimizer_checks.follows_a_switch(make, {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("capturable", [True, False])
def test_goes_on_from_a_checkpoint(tmp_path: Path, capturable: bool) -> None:
    optimizer_checks.resumes(lambda model: LAMB(model.parameters(), lr=0.03, capturable=capturable), tmp_path)


def test_is_copied() -> None:
    optimizer_checks.is_copied(make)


def test_trains_in_bf16() -> None:
    optimizer_checks.trains_in_bf16(make)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="beta"):
        LAMB(parameters(torch.float32), lr=1.0, betas=(0.9, 1.0))


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Also that nothing in a step waits: capture would fail."""
    one, other = parameters(torch.float32, "cuda"), parameters(torch.float32, "cuda")
    lr = torch.tensor(0.01, device="cuda")
    captured, eager = LAMB(one, lr=lr, capturable=True), LAMB(other, lr=lr)
    for params in (one, other):
        for p in params:
            p.grad = torch.ones_like(p)
    captured.step()
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for rate in (0.05, 0.02):
        lr.fill_(rate)
        graph.replay()
        eager.step()
    torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_capture_with_steps_on_the_host_is_refused() -> None:
    params = parameters(torch.float32, "cuda")
    optimizer = LAMB(params, lr=0.01)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
