"""Each low-rank layer outside plain eager: ONNX, torch.export, torch.compile, autocast, copies."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pufferfish as pf

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` as a function of one input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


def hf_conv1d() -> nn.Module:
    module = pytest.importorskip("transformers.pytorch_utils")
    conv: nn.Module = module.Conv1D(48, 32)
    return conv


@dataclass(frozen=True)
class Layer:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    low_rank: type[nn.Module]
    batch: int = 0  # the input's batch dimension

    def dense(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(self.build())

    def make(self) -> nn.Module:
        model = self.dense()
        pf.factorize_(model, pf.plan(model, rank=pf.Ratio(0.25, multiple=4)))
        assert any(type(m) is self.low_rank for m in model.modules())
        return model

    def input(self, batches: int = 1) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(1))
        return torch.cat([x] * batches, self.batch)


_image = (2, 32, 9, 10)
_words = (3, 4, 32)
_low = pf.layers
LAYERS = {
    "linear": Layer(lambda: nn.Linear(32, 40), _words, _low.LowRankLinear),
    "conv1d": Layer(lambda: nn.Conv1d(32, 40, 3, 2, 1), (2, 32, 11), _low.LowRankConv),
    "conv2d": Layer(lambda: nn.Conv2d(32, 40, (3, 1), 2, (1, 0)), _image, _low.LowRankConv),
    "conv3d": Layer(lambda: nn.Conv3d(32, 40, 3, padding="same"), (2, 32, 4, 5, 6), _low.LowRankConv),
    "grouped": Layer(lambda: nn.Conv2d(32, 64, 3, dilation=2, groups=2), _image, _low.LowRankConv),
    "conv_transpose2d": Layer(
        lambda: nn.ConvTranspose2d(32, 40, 3, 2, 1, output_padding=1), _image, _low.LowRankConvTranspose
    ),
    "lstm": Layer(lambda: nn.LSTM(32, 32, batch_first=True, bidirectional=True), _words, _low.LowRankLSTM),
    "gru": Layer(lambda: nn.GRU(32, 32), (4, 3, 32), _low.LowRankGRU, batch=1),
    "rnn": Layer(lambda: nn.RNN(32, 32), (4, 3, 32), _low.LowRankRNN, batch=1),
    "attention": Layer(SelfAttention, _words, _low.LowRankMultiheadAttention),
    "hf_conv1d": Layer(hf_conv1d, _words, _low.LowRankConv1D),
    "encoder_layer": Layer(
        lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
        _words,
        _low.LowRankMultiheadAttention,
    ),
}

#: Layers that leave eager mode as another one of their type does.
ALIKE = ("conv1d", "conv3d", "grouped", "gru", "rnn", "encoder_layer")
one_of_each_type = pytest.mark.parametrize(
    "layer",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in LAYERS],
    indirect=True,
)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


def tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def close(got: Any, want: Any, tolerance: float) -> None:
    """Equal up to `tolerance` of each tensor's largest value, or of a hundredth of the largest of all."""
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    sizes = [y.abs().max().item() for _, y in pairs]
    for (x, y), size in zip(pairs, sizes, strict=True):  # the gradient of a key's bias is zero, but for noise
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(size, max(sizes) / 100))


def where_dense_does(action: Callable[[nn.Module], Any], layer: Layer, model: nn.Module) -> Any:
    """`action` on the low-rank model; where it fails on the dense one too, skip with that error."""
    try:
        return action(model)
    except Exception:
        try:
            action(layer.dense().train(model.training))
        except Exception as error:
            line = next(iter(str(error).splitlines()), "")
            pytest.skip(f"the dense layer fails: {type(error).__name__}: {line}")
        raise


def step(model: Callable[[Tensor], Any], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    """Outputs, then gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    outputs = tensors(model(x))
    loss = torch.stack([y.float().square().sum() for y in outputs]).sum()
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, [x, *parameters])]


@one_of_each_type
def test_export(layer: Layer) -> None:
    """For any batch size, from one."""
    model = layer.make().eval()
    shapes = ({layer.batch: torch.export.Dim.DYNAMIC},)

    def export(m: nn.Module) -> torch.export.ExportedProgram:
        return torch.export.export(m, (layer.input(),), dynamic_shapes=shapes)

    exported = where_dense_does(export, layer, model).module()
    for batches in (1, 3):
        x = layer.input(batches)
        close(exported(x), model(x), 1e-6)


@one_of_each_type
def test_onnx(layer: Layer, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = layer.make().eval()
    path = tmp_path / "layer.onnx"
    shapes = ({layer.batch: torch.export.Dim.DYNAMIC},)

    def export(m: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(m, (layer.input(),), path, dynamo=True, dynamic_shapes=shapes, verbose=False)

    where_dense_does(export, layer, model)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (x.name for x in session.get_inputs())
    for batches in (1, 3):
        x = layer.input(batches)
        got = [torch.from_numpy(y) for y in session.run(None, {name: x.numpy()})]
        close(got, model(x), 1e-4)


@one_of_each_type
@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_compile(layer: Layer, mode: str) -> None:
    """Forward and backward, in one graph."""
    compiles(layer, mode, "aot_eager", 1e-6)


@pytest.mark.slow
def test_inductor(layer: Layer) -> None:
    compiles(layer, "train", "inductor", 1e-4)


def compiles(layer: Layer, mode: str, backend: str, tolerance: float) -> None:
    model, x = layer.make().train(mode == "train"), layer.input()

    def compiled(m: nn.Module) -> list[Tensor]:
        torch._dynamo.reset()
        return step(torch.compile(m, backend=backend, fullgraph=True), list(m.parameters()), x)

    close(where_dense_does(compiled, layer, model), step(model, list(model.parameters()), x), tolerance)


def test_autocast(layer: Layer) -> None:
    """bf16 inside, float32 gradients, and results of bf16's precision."""
    model, x = layer.make(), layer.input()
    parameters = list(model.parameters())
    want = step(model, parameters, x)
    seen = set()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d):
            m.register_forward_hook(lambda m, args, output: seen.add(output.dtype))
    got = step(forward, parameters, x)
    assert seen == {torch.bfloat16}
    assert all(g.dtype == p.dtype for g, p in zip(got[-len(parameters) :], parameters, strict=True))
    close([y.float() for y in got], want, 0.05)


def test_copies(layer: Layer, tmp_path: Path) -> None:
    model, x = layer.make().eval(), layer.input()
    want, state = model(x), copy.deepcopy(model.state_dict())
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        close(other(x), want, 0.0)
        pf.merge_(other)
        close(other(x), want, 1e-4)
        torch.save(other, tmp_path / "dense.pt")
        assert b"pufferfish" not in (tmp_path / "dense.pt").read_bytes()  # no class of ours for weights_only
        with torch.no_grad():
            for p in other.parameters():
                p.fill_(0.0)
    assert any(type(m) is layer.low_rank for m in model.modules())
    close(dict(model.state_dict()), dict(state), 0.0)
