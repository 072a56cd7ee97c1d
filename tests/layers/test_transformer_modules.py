"""nn.TransformerEncoder, nn.TransformerDecoder and nn.Transformer with low-rank layers inside.

Their evaluation path calls fused kernels for dense layers, on nested tensors where a padding mask is given and the
first layer is dense.
"""

import copy

import pytest
import torch
from reference import assert_close, assert_same, factorized, reference, tensors
from torch import nn

import pufferfish as pf

E, HEADS, BATCH, TIME = 8, 2, 3, 4
SETTINGS = {"d_model": E, "nhead": HEADS, "dim_feedforward": 12, "dropout": 0.0, "dtype": torch.float64}
PADDING = torch.arange(TIME) >= torch.tensor([[4], [2], [3]])  # True behind each sequence's end
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TIME, dtype=torch.float64)
FACTORIZED = {
    "all": {},
    "first layer dense": {"keep": ["*layers.0.*"]},
    "last layer dense": {"keep": ["*layers.1.*"]},
    "attention only": {"only": ["*attn*"]},
    "feed-forward only": {"only": ["*linear?"]},
    "query and second linear": {"only": ["*.q", "*linear2"]},
}


def perturbed(model):
    """Random biases, for torch starts most of them at zero."""
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**SETTINGS, **{"batch_first": True} | options)
    return perturbed(nn.TransformerEncoder(layer, 2))


def random_input(time=TIME):
    return torch.randn(BATCH, time, E, dtype=torch.float64)


@pytest.mark.parametrize("which", FACTORIZED)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL, "is_causal": True}]
)
def test_encoder(which, mode, masks):
    """Also in evaluation mode, as long as gradients are wanted."""
    dense = encoder().train(mode == "train")
    low_rank = factorized(dense, **FACTORIZED[which])
    assert_same(low_rank, dense, [random_input()], lambda model, x: model(x, **masks))


@pytest.mark.parametrize("which", FACTORIZED)
@pytest.mark.parametrize("hook", [None, "layers.0", "layers.1.self_attn", "layers.1.linear1"])
def test_encoder_on_nested_tensors(which, hook):
    """The low-rank layers behind a dense one get the nested tensor; a low-rank first layer keeps torch from making one."""
    dense = encoder().eval()
    low_rank = factorized(dense, **FACTORIZED[which])
    seen = []
    if hook:
        low_rank.get_submodule(hook).register_forward_hook(lambda *args: seen.append(args[1][0].is_nested))
    x = random_input()
    with torch.no_grad():
        ours, theirs = (
            model(x, src_key_padding_mask=PADDING) for model in (low_rank, reference(low_rank, dense))
        )
    nested = which == "first layer dense"
    assert seen == [nested] * bool(hook)
    assert bool(ours[PADDING].any()) != nested  # torch fills up nested tensors with zeros
    assert_close([ours[~PADDING]], [theirs[~PADDING]], 1e-10)


@pytest.mark.parametrize(
    "options", [{"norm_first": True}, {"batch_first": False}, {"activation": "gelu"}, {"bias": False}]
)
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDING}, {"src_mask": CAUSAL}])
def test_encoder_layer_without_gradient(options, masks):
    torch.manual_seed(0)
    dense = perturbed(nn.TransformerEncoderLayer(**SETTINGS, **{"batch_first": True} | options)).eval()
    low_rank, x = factorized(dense), random_input()
    x = x if dense.self_attn.batch_first else x.transpose(0, 1)
    with torch.no_grad():
        ours, theirs = (model(x, **masks) for model in (low_rank, reference(low_rank, dense)))
    assert_close([ours], [theirs], 1e-10)


def test_merged_encoder_computes_the_same_on_nested_tensors():
    low_rank, x = factorized(encoder().eval()), random_input()
    merged = copy.deepcopy(low_rank)
    pf.merge_(merged)
    assert not any(isinstance(module, pf.layers.LowRank) for module in merged.modules())
    with torch.no_grad():
        ours, theirs = (model(x, src_key_padding_mask=PADDING) for model in (low_rank, merged))
    assert not theirs[PADDING].any()
    assert_close([ours[~PADDING]], [theirs[~PADDING]], 1e-10)


@pytest.mark.parametrize("which", FACTORIZED)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder(which, mode, batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(**SETTINGS, batch_first=batch_first)
    dense = perturbed(nn.TransformerDecoder(layer, 2)).train(mode == "train")
    low_rank = factorized(dense, **FACTORIZED[which])
    inputs = [random_input(), random_input(5)]
    inputs = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
    padding = torch.zeros(PADDING.shape, dtype=torch.float64).masked_fill(PADDING, -1e9)
    masks = {"tgt_mask": CAUSAL, "tgt_key_padding_mask": padding, "tgt_is_causal": True}
    call = lambda model, tgt, memory: model(tgt, memory, **masks)  # noqa: E731
    assert_same(low_rank, dense, inputs, call)
    with torch.no_grad():
        ours, theirs = (tensors(call(model, *inputs)) for model in (low_rank, reference(low_rank, dense)))
    assert_close(ours, theirs, 1e-10)
