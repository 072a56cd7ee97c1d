"""Layers that share an input, on a GPU in bf16: the losses of training and the gradients of the plain path."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import Llama
from pufferfish.planning.timing import capture_cuda_graph

pytestmark = pytest.mark.gpu


def models() -> tuple[nn.Module, nn.Module]:
    """The same low-rank model, without and with one product for layers that share an input."""
    torch.manual_seed(0)
    dense = Llama(vocabulary=61, d=128, layers=3, heads=4, kv_heads=2, context=32).cuda()
    plan = pf.plan(dense, 0.25, example=torch.zeros(1, 32, dtype=torch.long, device="cuda"), measure=False)
    assert plan.shared_inputs
    apart = copy.deepcopy(dense)
    pf.factorize_(apart, dataclasses.replace(plan, shared_inputs=()))
    pf.factorize_(dense, plan)
    return apart, dense


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda, cache_enabled=False):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("mode", ["eager", "graph", "compile"])
def test_eight_steps(mode: str) -> None:
    tokens = torch.randint(61, (8, 33), device="cuda")

    def losses(model: nn.Module, mode: str) -> list[float]:
        found: list[float] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        run = torch.compile(loss, dynamic=False) if mode == "compile" else loss
        last = torch.zeros((), device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            value = run(model, tokens)
            value.backward()
            optimizer.step()
            last.copy_(value.detach())

        call = step
        if mode == "graph":
            start = copy.deepcopy(model.state_dict())
            call = capture_cuda_graph(step)  # trains while it warms up
            model.load_state_dict(start)
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        for _ in range(8):
            call()
            found.append(last.item())
        return found

    plain, shared = models()
    expected, found = losses(plain, "eager"), losses(shared, mode)
    assert expected[-1] < 0.9 * expected[0]
    assert found == pytest.approx(expected, rel=0.02)


def test_gradients_are_as_exact_as_those_of_the_plain_path() -> None:
    plain, shared = models()
    tokens = torch.randint(61, (8, 33), device="cuda")
    reference = copy.deepcopy(plain).cpu().double()

    def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        loss(model, tokens).backward()
        return {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(reference, tokens.cpu())
    errors = [
        {
            name: ((g - exact[name]).norm() / exact[name].norm()).item()
            for name, g in gradients(model, tokens).items()
        }
        for model in (plain, shared)
    ]
    assert errors[0].keys() == errors[1].keys() == exact.keys()
    for name, error in errors[1].items():
        assert error < max(1.5 * errors[0][name], 0.01), name
