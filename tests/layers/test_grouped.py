"""Grouped products and routing, compared with a loop over experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pufferfish.layers import GroupedLinear, Routing

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def loop(layer, rows, ends):
    """One expert at a time."""
    output, start = [], 0
    for e, end in enumerate(ends.tolist()):
        weight = layer.weight[e].T if layer.transposed else layer.weight[e]
        part = rows[start:end] @ weight.T
        output.append(part if layer.bias is None else part + layer.bias[e])
        start = end
    return torch.cat(output)


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),  # rows of each expert, also none
    n=st.integers(1, 20),
    m=st.integers(1, 20),
    bias=st.booleans(),
    transposed=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_grouped_linear_is_a_loop_over_experts(counts, n, m, bias, transposed, dtype):
    torch.manual_seed(0)
    layer = GroupedLinear(len(counts), n, m, bias, transposed, dtype=dtype)
    rows = torch.randn(sum(counts), n, dtype=dtype, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0)
    inputs = [rows, *layer.parameters()]
    results = []
    for output in (layer(rows, ends), loop(layer, rows, ends)):
        assert output.shape == (sum(counts), m)
        # The gradient of a sum is an expanded tensor.
        gradients = torch.autograd.grad(output.sum(), inputs, allow_unused=True, materialize_grads=True)
        results.append([output, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=5 * TOLERANCE[dtype])


def test_grouped_linear_under_autocast():
    layer, rows, ends = GroupedLinear(2, 8, 8), torch.randn(4, 8), torch.tensor([1, 4])
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(rows, ends)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 7), k=st.integers(1, 3), experts=st.integers(3, 6), seed=st.integers(0, 99))
def test_routing(tokens, k, experts, seed):
    torch.manual_seed(seed)
    index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    x = torch.randn(tokens, 2, dtype=torch.float64, requires_grad=True)
    routing = Routing(index, experts)
    # (expert, token) pairs, by expert and then in the order of the tokens.
    pairs = sorted((int(e), t) for t in range(tokens) for e in index[t])
    assert routing.ends.tolist() == [sum(e <= last for e, _ in pairs) for last in range(experts)]
    rows, expected = routing.to_experts(x), x[[t for _, t in pairs]]
    assert torch.equal(rows, expected)
    back = routing.to_tokens(rows)
    assert torch.equal(back, x.unsqueeze(1).expand(-1, k, -1))
    weights = torch.randn_like(back)
    ours, theirs = (
        torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (back, x.unsqueeze(1))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_new_layers_are_initialized_as_linear_layers(bias):
    torch.manual_seed(0)
    layer = GroupedLinear(4, 64, 32, bias)
    for parameter in layer.parameters():
        assert parameter.abs().max() <= 64**-0.5
        assert float(parameter.std()) == pytest.approx((64**-0.5) / 3**0.5, rel=0.1)
