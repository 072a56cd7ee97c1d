"""Low-rank experts on a GPU: grouped kernels, CUDA graphs, compilation."""

import copy

import pytest
import torch
from torch import nn

import pufferfish as pf
from matrices import forced
from pufferfish.planning.timing import capture_cuda_graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

E, K, D = 8, 2, 64


def build(rank, inner=96):
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = modeling.MixtralConfig(hidden_size=D, intermediate_size=inner, num_local_experts=E)
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": modeling.MixtralExperts(config)}).cuda()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    pf.factorize_(model, forced(model, rank=rank))
    return model["experts"]


def inputs(dtype, tokens=256):
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).cuda()
    weights = torch.rand(tokens, K).to("cuda", dtype)
    return torch.randn(tokens, D).to("cuda", dtype).requires_grad_(), index, weights


@pytest.mark.parametrize("rank", [16, 13])  # 13 is padded
@pytest.mark.parametrize("inner", [96, 32])  # gate and up together and apart
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients(rank, inner, dtype):
    exact = build(rank, inner).double()
    experts = copy.deepcopy(exact).to(dtype)
    results = []
    for model, kind in ((experts, dtype), (exact, torch.float64)):
        args = inputs(kind)
        output = model(*args)
        assert output.dtype == kind
        output.square().mean().backward()
        results.append([output, args[0].grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (0.03 if dtype == torch.bfloat16 else 5e-3)


def test_a_cuda_graph():
    """The routing of a captured step is that of its inputs, not of the batch it was captured with."""
    experts = build(16).bfloat16()
    tokens, index, weights = inputs(torch.bfloat16)

    def step():
        experts.zero_grad(set_to_none=False)
        experts(tokens, index, weights).square().mean().backward()

    step()
    replay = capture_cuda_graph(step)
    for seed in (2, 3):
        torch.manual_seed(seed)
        index.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(len(tokens))]))
        step()
        want = [p.grad.clone() for p in experts.parameters()]
        replay()
        for p, grad in zip(experts.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0.02, atol=1e-4)


def test_compiled():
    experts = build(16).bfloat16()
    args = inputs(torch.bfloat16)
    compiled = torch.compile(experts, fullgraph=True)
    torch.testing.assert_close(compiled(*args), experts(*args), rtol=0.05, atol=0.05)


def test_autocast():
    experts = build(16)
    tokens, index, weights = inputs(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        output = experts(tokens, index, weights)
    output.square().mean().backward()
    error = (output - experts(tokens, index, weights)).norm() / output.norm()
    assert 0 < error < 0.03
    assert {p.grad.dtype for p in experts.parameters()} == {torch.float32}
