"""The fused kernel on a GPU: against fp64, in CUDA graphs, compiled, under autocast."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from test_fused_product import assert_close, check_kernel, plain, results
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.layers import fused_product
from pufferfish.planning.timing import capture_cuda_graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS = fused_product.MIN_ROWS + 72  # not a multiple of a program's rows


def build(rank: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 320), nn.Tanh(), nn.Linear(320, 80)).to("cuda", dtype)
    pf.factorize_(model, pf.plan(model, rank, min_saving=-1))
    for i in (0, 2):
        model[i]._fused = True
    return model


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, ROWS // 8, 192, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel(dtype: torch.dtype) -> None:
    check_kernel("cuda", dtype)


@pytest.mark.parametrize("rank", [16, 48, 64, 80])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_outputs_and_gradients(rank: int, autocast: bool, compiled: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, x = build(rank, dtype), batch(dtype)
    exact = plain(model).double()
    call = torch.compile(model, fullgraph=True) if compiled else model
    context = torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.profiler.profile() as profile, context:
        ours = results(model, x, call)
    assert any(event.key == "two_products_kernel" for event in profile.key_averages())
    assert [g.dtype for g in ours[1:]] == [dtype] * 7
    assert_close(ours, results(exact, x.detach().double().requires_grad_()), 0.03)


def test_a_cuda_graph() -> None:
    """Eight steps of SGD in a graph give the losses of the plain path."""
    losses = []
    for fused in (True, False):
        model = build(64)
        model = model if fused else plain(model)
        x = batch().detach()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = torch.zeros((), device="cuda")

        def step(model=model, x=x, optimizer=optimizer, loss=loss) -> None:
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", torch.bfloat16):
                value = model(x).float().square().mean()
            value.backward()
            optimizer.step()
            loss.copy_(value.detach())

        before = copy.deepcopy(model.state_dict())
        replay = capture_cuda_graph(step)
        model.load_state_dict(before)
        each = []
        for _ in range(8):
            replay()
            each.append(loss.item())
        losses.append(each)
    assert losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_few_rows() -> None:
    """The same values from two calls, where a program for 128 rows each leaves the GPU idle."""
    model = build(64, torch.bfloat16)
    x = batch(torch.bfloat16)
    with torch.profiler.profile() as profile:
        few = model(x[:1])
    assert all(event.key != "two_products_kernel" for event in profile.key_averages())
    assert_close([few], [model(x)[:1]])
