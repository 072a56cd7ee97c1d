"""Low-rank MultiheadAttention against torch's own on the multiplied-out weights."""

import math
from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close, assert_same, factorized, multiplied_out, reference, tensors
from torch import nn

import pufferfish as pf

EMBED, HEADS, QUERIES, KEYS, BATCH = 8, 4, 3, 5, 2
flag = st.booleans()


def attention(**options):
    """With random biases: torch initialises most of them to zero, which would hide a lost one."""
    options = {"embed_dim": EMBED, "num_heads": HEADS, "dtype": torch.float64} | options
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(**options)
    for name, parameter in dense.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return dense


@st.composite
def attentions(draw):
    options = {name: draw(flag) for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    other = st.sampled_from([None, 5])
    return attention(
        num_heads=draw(st.sampled_from([1, 2, 4])), kdim=draw(other), vdim=draw(other), **options
    )


def queries_keys_values(dense, batched=True, keys=KEYS):
    inputs = []
    for time, size in ((QUERIES, EMBED), (keys, dense.kdim), (keys, dense.vdim)):
        shape = (BATCH, time) if dense.batch_first else (time, BATCH)
        inputs.append(torch.randn(*(shape if batched else (time,)), size, dtype=dense.out_proj.weight.dtype))
    return inputs


def partial_call(**arguments):
    return lambda layer, *qkv: layer(*qkv, **arguments)


def random_mask(kind, *shape):
    """True, or a number, where a key counts less. The first key stays, so that no row is all -inf."""
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = False
    return (
        mask if kind == "bool" else torch.randn(shape, dtype=torch.float64).masked_fill(mask, float("-inf"))
    )


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


@settings(deadline=None, max_examples=50)
@given(
    dense=attentions(),
    rank=st.integers(1, 4),
    batched=flag,
    masks=st.sampled_from(["bool", "float"]),
    attn_dims=st.sampled_from([None, 2, 3]),
    padding=flag,
    weights=st.sampled_from([None, "average", "heads"]),
)
def test_all_kinds(dense, rank, batched, masks, attn_dims, padding, weights):
    low_rank = factorized(dense, rank)
    assert type(low_rank) is pf.layers.LowRankMultiheadAttention
    batch = (BATCH,) if batched else ()
    rows = (math.prod(batch) * dense.num_heads,) if attn_dims == 3 else ()
    call = partial_call(
        attn_mask=random_mask(masks, *rows, QUERIES, KEYS) if attn_dims else None,
        key_padding_mask=random_mask(masks, *batch, KEYS) if padding else None,
        need_weights=weights is not None,
        average_attn_weights=weights == "average",
    )
    assert_same(low_rank, dense, queries_keys_values(dense, batched), call)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("masks", ["bool", "float"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_hint(extra, masks, padding, need_weights):
    """Torch is called without the hint, which would hide bias_k and the zero key there."""
    dense = attention(**extra)
    mask = torch.ones(QUERIES, QUERIES).triu(1).bool()
    arguments = {
        "attn_mask": mask if masks == "bool" else additive(mask),
        "key_padding_mask": random_mask(masks, BATCH, QUERIES) if padding else None,
        "need_weights": need_weights,
    }
    inputs = queries_keys_values(dense, keys=QUERIES)
    hinted, plain = partial_call(**arguments, is_causal=True), partial_call(**arguments)
    assert_same(factorized(dense), dense, inputs, hinted, reference_call=plain)


def test_the_causal_hint_replaces_the_mask():
    """As in torch, where nothing else is masked: a wrong mask under the hint is not looked at."""
    dense = attention(batch_first=True)
    low_rank, (q, k, v) = factorized(dense), queries_keys_values(dense, keys=QUERIES)
    nothing = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    arguments = {"attn_mask": nothing, "need_weights": False}
    hinted = low_rank(q, k, v, **arguments, is_causal=True)
    assert_close(
        tensors(hinted), tensors(reference(low_rank, dense)(q, k, v, **arguments, is_causal=True)), 1e-10
    )
    assert not torch.allclose(hinted[0], low_rank(q, k, v, **arguments)[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", [None, "bool"])
def test_evaluation_without_gradient(batch_first, masks):
    """Where torch runs its fused kernel, on self-attention."""
    dense = attention(batch_first=batch_first).eval()
    low_rank, x = factorized(dense), torch.randn(BATCH, BATCH, EMBED, dtype=torch.float64)
    mask = masks and random_mask(masks, BATCH, BATCH)
    with torch.no_grad():
        ours, theirs = (layer(x, x, x, mask) for layer in (low_rank, reference(low_rank, dense)))
    assert_close(tensors(ours), tensors(theirs), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_low_precision(dtype, need_weights):
    dense = attention(dtype=dtype)
    inputs = queries_keys_values(dense)
    assert_same(factorized(dense), dense, inputs, partial_call(need_weights=need_weights))


@pytest.mark.parametrize("kdim", [None, 5])
@pytest.mark.parametrize("only", [["0.q"], ["0.k", "0.v"], ["0.out"], ["0.q", "0.out"]])
def test_only_some_matrices(only, kdim):
    dense = attention(kdim=kdim, add_bias_kv=True)
    low_rank = factorized(dense, only=only)
    assert [f"0.{name}" for name in low_rank.ranks] == only
    assert_same(low_rank, dense, queries_keys_values(dense))


def test_dropped_weights_are_torchs():
    """The same random numbers, for torch draws them in the same order: with need_weights both call F.dropout."""
    dense = attention(dropout=0.5)
    low_rank, inputs = factorized(dense), queries_keys_values(dense)
    outputs = []
    for layer in (low_rank, reference(low_rank, dense)):
        torch.manual_seed(3)
        outputs.append(tensors(layer(*inputs, average_attn_weights=False)))
    assert (outputs[0][1] == 0).any()
    assert_close(*outputs, 1e-10)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5}])
@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_dense_parameters_can_be_read(name, options):
    low_rank = factorized(attention(**options), only=["0.q", "0.out"])
    ours, theirs = attrgetter(name)(low_rank), multiplied_out(low_rank).get(name)
    if theirs is None:
        assert ours is None
    else:
        torch.testing.assert_close(ours, theirs)


def test_bad_calls_are_refused():
    dense = attention()
    low_rank, (q, k, v) = factorized(dense), queries_keys_values(dense)
    with pytest.raises(RuntimeError, match="is_causal"):
        low_rank(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match="uint8"):
        low_rank(q, k, v, key_padding_mask=torch.zeros(BATCH, KEYS, dtype=torch.uint8))
