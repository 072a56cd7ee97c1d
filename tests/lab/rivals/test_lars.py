"""LARS against its formula, tensor by tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optimizer_checks
import pytest
import torch
from optimizer_checks import give_gradients, parameters
from torch import Tensor, nn

from pufferfish.lab.rivals import LARS


def reference(params: list[Tensor], kept: dict[int, Tensor], group: dict[str, Any]) -> None:
    """One step."""
    for i, p in enumerate(params):
        g = p.grad
        if g is None:
            continue
        if p.dim() > 1 or not group["exclude_vectors"]:
            w, size, decay = float(p.detach().norm()), float(g.norm()), group["weight_decay"]
            ratio = group["trust"] * w / (size + decay * w) if w and size else 1.0
            g = ratio * (g + decay * p.detach())
        if group["momentum"]:
            kept[i] = g if i not in kept else group["momentum"] * kept[i] + g
            g = g + group["momentum"] * kept[i] if group["nesterov"] else kept[i]
        p.data -= float(group["lr"]) * g


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "exclude_vectors": False},
        {"momentum": 0.0, "trust": 0.02},
    ],
)
def test_equals_the_formula(dtype: torch.dtype, foreach: bool | None, settings: dict[str, Any]) -> None:
    own = {"weight_decay": 0.01, "lr": 3.0, "trust": 0.005}
    make = partial(LARS, lr=10.0, foreach=foreach, **settings)
    optimizer_checks.equals_a_formula(make, reference, own, dtype)


def test_zero_norms_have_ratio_one() -> None:
    empty, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    empty.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    LARS([empty, still], lr=0.5, weight_decay=0.1, momentum=0.0).step()
    assert torch.equal(empty, torch.full((2, 2), -0.5))
    torch.testing.assert_close(still.detach(), torch.full((2, 2), 1 - 0.5 * 0.1))


def test_low_precision() -> None:
    """Norms are taken in fp32: this one's square has no place in fp16."""
    half, single = (
        nn.Parameter(torch.full((64, 64), 100.0, dtype=d)) for d in (torch.float16, torch.float32)
    )
    for p in (half, single):
        p.grad = torch.full_like(p, 50.0)
        LARS([p], lr=10.0).step()
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.detach().float(), single.detach(), rtol=1e-3, atol=0)


def test_rate_in_a_tensor_is_read_at_every_step() -> None:
    one, other = parameters(torch.float64), parameters(torch.float64)
    lr = torch.tensor(10.0)
    with_tensor, with_number = LARS(one, lr=lr), LARS(other, lr=10.0)
    for step, rate in enumerate((10.0, 4.0, 2.5)):
        give_gradients(one, step)
        give_gradients(other, step)
        lr.fill_(rate)
        with_number.param_groups[0]["lr"] = rate
        with_tensor.step()
        with_number.step()
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_never_waits_for_the_device() -> None:
    optimizer_checks.does_not_wait(lambda params: LARS(params, lr=1.0, weight_decay=0.1, nesterov=True))
    optimizer_checks.does_not_wait(lambda params: LARS(params, lr=torch.tensor(1.0)))


def make(model: nn.Module) -> LARS:
    return LARS(model.parameters(), lr=0.2, trust=0.05, weight_decay=1e-4, nesterov=True)


def test_follows_a_switch_and_back() -> None:
    optimizer_checks.follows_a_switch(make, {"momentum_buffer"})


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    optimizer_checks.resumes(make, tmp_path)


def test_is_copied() -> None:
    optimizer_checks.is_copied(make)


def test_trains_in_bf16() -> None:
    optimizer_checks.trains_in_bf16(make)


def test_later_groups_have_the_same_settings() -> None:
    a, b = parameters(torch.float32)[:2]
    optimizer = LARS([a], lr=1.0, trust=0.5)
    optimizer.add_param_group({"params": [b]})
    assert [group["trust"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_bad_settings() -> None:
    p = parameters(torch.float32)
    with pytest.raises(ValueError, match=r"trust=0 is not above 0"):
        LARS(p, lr=1.0, trust=0)
    with pytest.raises(ValueError, match="momentum"):
        LARS(p, lr=1.0, momentum=0, nesterov=True)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Also that nothing in a step waits: capture would fail."""
    one, other = parameters(torch.float32, "cuda"), parameters(torch.float32, "cuda")
    lr = torch.tensor(1.0, device="cuda")
    settings: dict[str, Any] = {"weight_decay": 0.1, "nesterov": True}
    captured, eager = LARS(one, lr=lr, **settings), LARS(other, lr=lr, **settings)
    for params in (one, other):
        for p in params:
            p.grad = torch.ones_like(p)
    captured.step()
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for rate in (5.0, 2.0):
        lr.fill_(rate)
        graph.replay()
        eager.step()
    torch.testing.assert_close(one, other)
