"""Reference models: exact sizes, dense and hybrid, and forward and backward passes."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn

from paper import COUNTS
from pufferfish.lab.models import (
    GPT,
    REFERENCES,
    Llama,
    LSTMLanguageModel,
    Transformer,
)

FACTORIZABLE = (nn.Linear, nn.Conv2d, nn.LSTM)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return REFERENCES[name].build()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def saved(m: int, n: int) -> int:
    """Parameters that factorizing an m x n matrix at ratio 0.25 saves."""
    r = int(0.25 * min(m, n))
    return max(0, m * n - r * (m + n))


def saved_by(layer: nn.Module) -> int:
    if isinstance(layer, nn.LSTM):
        matrices = [p for name, p in layer.named_parameters() if name.startswith("weight")]
        return sum(4 * saved(p.shape[0] // 4, p.shape[1]) for p in matrices)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return saved(layer.weight.shape[0], layer.weight[0].numel())


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_papers(name: str) -> None:
    model = on_meta(name)
    low_rank = [
        layer
        for path, layer in model.named_modules()
        if isinstance(layer, FACTORIZABLE) and not any(fnmatchcase(path, p) for p in REFERENCES[name].keep)
    ]
    dense, hybrid = COUNTS[name]
    assert count(model) == dense
    assert dense - sum(map(saved_by, low_rank)) == hybrid


def test_gpt_count() -> None:
    d = 384
    block = 12 * d * d + 9 * d  # attention, feed-forward; its biases and two norms
    assert count(on_meta("gpt")) == 256 * d + 256 * d + 6 * block + 2 * d


OUTPUTS = {
    "vgg19": (128, 10),
    "vgg19_one_fc": (128, 10),
    "resnet18": (128, 10),
    "resnet50": (32, 1000),
    "wide_resnet50_2": (32, 1000),
    "lstm": (35, 20, 33_278),
    "transformer": (32, 24, 9521),
    "gpt": (8, 256, 256),
    "llama": (8, 256, 256),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_narrower_model(name: str) -> None:
    """It has the same layers and outputs; about a quarter of the weights between hidden layers at half the width."""
    build, full = REFERENCES[name].build, on_meta(name)
    with torch.device("meta"):
        half, same = build(width=0.5), build(width=1.0)
        output = half(*REFERENCES[name].example())
    assert (output[0] if isinstance(output, tuple) else output).shape == OUTPUTS[name]
    assert [(n, p.shape) for n, p in same.named_parameters()] == [
        (n, p.shape) for n, p in full.named_parameters()
    ]
    assert [n for n, _ in half.named_parameters()] == [n for n, _ in full.named_parameters()]
    sizes = {n: p.numel() for n, p in full.named_parameters()}
    large = [(p.numel(), sizes[n]) for n, p in half.named_parameters() if p.dim() > 1]
    large = [pair for pair in large if pair[1] > 200_000]
    shares = {round(small / big, 2) for small, big in large}
    assert shares <= {0.25, 0.5}, shares  # 0.5: of embeddings and classifiers
    assert 0.25 in shares


def tiny_gpt() -> GPT:
    return GPT(vocabulary=11, d=16, layers=2, heads=2, context=8)


def tiny_llama() -> Llama:
    return Llama(vocabulary=11, d=16, layers=2, heads=4, kv_heads=2, context=8)


def tiny_transformer() -> Transformer:
    return Transformer(vocabulary=11, d=16, layers=2, heads=2, hidden=32, length=8)


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 11, shape)


def test_lstm_continues_from_its_state() -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(vocabulary=11, d=8).eval()
    text = tokens(6, 3)
    whole, _ = model(text)
    first, state = model(text[:2])
    second, _ = model(text[2:], state)
    torch.testing.assert_close(torch.cat((first, second)), whole)


@pytest.mark.parametrize("build", [tiny_gpt, tiny_llama])
def test_decoders_are_causal(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    text = tokens(2, 8)
    changed = text.clone()
    changed[:, 5] = 0
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_transformer_decoder_is_causal() -> None:
    torch.manual_seed(0)
    model = tiny_transformer().eval()
    source, target = tokens(2, 6), tokens(2, 7)
    changed = target.clone()
    changed[:, 4] = 0
    before, after = model(source, target), model(source, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_transformer_ignores_source_padding() -> None:
    torch.manual_seed(0)
    model = tiny_transformer().eval()
    source, target = tokens(2, 5), tokens(2, 7)
    padded = torch.cat((source, torch.zeros(2, 3, dtype=torch.long)), dim=1)
    torch.testing.assert_close(model(padded, target), model(source, target))


def test_transformer_encoder_sees_the_whole_source() -> None:
    torch.manual_seed(0)
    model = tiny_transformer().eval()
    source = tokens(1, 6)
    changed = source.clone()
    changed[:, -1] = source[:, -1] % 10 + 1
    assert not torch.allclose(model.encode(source)[:, 0], model.encode(changed)[:, 0])
