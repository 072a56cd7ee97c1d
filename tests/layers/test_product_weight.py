"""The weight of a low-rank layer: asked for its metadata, computed with, and never written to."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import factorized, multiplied_out
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pufferfish.layers.product_weight import ProductWeight


@pytest.fixture
def layer() -> Any:
    return factorized(nn.Linear(6, 5))


def plain(layer: nn.Module) -> Tensor:
    """The product as an ordinary tensor."""
    return multiplied_out(layer)["weight"]


# Metadata.

X = torch.zeros(3, dtype=torch.float64)
METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda w: (w.shape, w.size(), w.size(0), w.ndim, w.dim(), len(w), w.numel(), torch.numel(w)),
    "dtype": lambda w: (w.dtype, w.is_floating_point(), torch.is_complex(w), w.element_size(), w.itemsize),
    "device": lambda w: (w.device, w.is_cuda, w.is_meta, w.get_device(), w.layout),
    "requires_grad": lambda w: w.requires_grad,
    "type_as": lambda w: X.type_as(w),
    "to": lambda w: X.to(w),
    "new_zeros": lambda w: w.new_zeros(3),
    "new_full": lambda w: w.new_full((2, 3), 4.0),
    "new_tensor": lambda w: w.new_tensor([1, 2]),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_costs_no_arithmetic(name: str) -> None:
    layer = factorized(nn.Linear(6, 5, dtype=torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        ours = METADATA[name](layer.weight)
    assert counter.get_total_flops() == 0
    theirs = METADATA[name](plain(layer))
    assert (
        torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        if isinstance(ours, Tensor)
        else ours == theirs
    )


def test_use_is_counted(layer: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.ones(3, 6), layer.weight)
    assert counter.get_total_flops() == 2 * (5 * 2 * 6 + 3 * 6 * 5)


def test_every_kind_has_one() -> None:
    gru, mha = factorized(nn.GRU(6, 5)), factorized(nn.MultiheadAttention(8, 2))
    conv, table = factorized(nn.Conv2d(4, 6, 3, groups=2)), factorized(nn.Embedding(9, 6), embed=2)
    weights = {
        "conv": (conv.weight, plain(conv)),
        "embedding": (table.weight, table.down.weight @ table.up.weight.T),
        "gru": (gru.weight_hh_l0.weight, multiplied_out(gru)["weight_hh_l0"]),
        "in_proj_weight": (mha.in_proj_weight, multiplied_out(mha)["in_proj_weight"]),
        "in_proj_bias": (mha.in_proj_bias, multiplied_out(mha)["in_proj_bias"]),
        "out_proj": (mha.out_proj.weight, multiplied_out(mha)["out_proj.weight"]),
    }
    for name, (ours, theirs) in weights.items():
        assert isinstance(ours, ProductWeight), name
        assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, True), name
        torch.testing.assert_close(ours, theirs)
        with pytest.raises(RuntimeError, match="cannot be changed"):
            nn.init.zeros_(ours)


# Use: as an ordinary tensor.

USES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda w: 2 * w + w - w / 3,
    "reflected": lambda w: torch.ones(5, 6) - w,
    "product": lambda w: torch.arange(12.0).view(2, 6) @ w.T,
    "linear": lambda w: F.linear(torch.arange(12.0).view(2, 6), weight=w),
    "list": lambda w: torch.cat([w, torch.ones(1, 6), w]),
    "view": lambda w: w.view(-1)[3:].sum(),
    "rows": lambda w: sum(row.norm() for row in w),
    "svd": lambda w: torch.linalg.svdvals(w),
    "norm": lambda w: w.norm(),
    "dtype": lambda w: w.to(torch.float64),
    "detach": lambda w: w.detach() + 0,
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "operand of a write": lambda w: torch.zeros(5, 6).add_(w),
    "copied": lambda w: torch.zeros(5, 6).copy_(w),
    "clone": lambda w: w.clone().mul_(2),
    "memory": lambda w: torch.tensor([*w.stride(), w.is_contiguous(), w.is_leaf, w.grad_fn is None]),
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
}


@pytest.mark.parametrize("name", USES)
def test_uses(name: str, layer: Any) -> None:
    ours, theirs = USES[name](layer.weight), USES[name](plain(layer))
    assert type(ours) is Tensor
    torch.testing.assert_close(ours, theirs)
    if theirs.requires_grad:
        parameters = [layer.down.weight, layer.up.weight]
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), parameters), torch.autograd.grad(theirs.sum(), parameters)
        )


def test_files_are_those_of_a_tensor(layer: Any) -> None:
    from safetensors.torch import load, save

    file = io.BytesIO()
    torch.save(layer.weight.detach(), file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), load(save({"w": layer.weight.detach()}))["w"]):
        assert torch.equal(loaded, layer.weight)


def test_it_follows_the_layer(layer: Any) -> None:
    weight = layer.weight
    before = weight.clone()
    with torch.no_grad():
        assert torch.equal(weight, before)
        layer.up.weight.mul_(2)
    assert torch.equal(weight, 2 * before)
    assert weight.norm().requires_grad  # although it was first computed without gradients


def test_autocast_leaves_its_dtype(layer: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == (layer.weight + 0).dtype == torch.float32
        assert F.linear(torch.ones(2, 6), layer.weight).dtype == torch.bfloat16


class Uses(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layer.weight
        return F.linear(x.to(weight.dtype), weight)


def test_compiled_and_exported(layer: Any) -> None:
    model, x = Uses(layer), torch.randn(3, 6)
    exported = torch.export.export(model, (x,)).module()
    for run in (torch.compile(model, backend="aot_eager", fullgraph=True), exported):
        torch.testing.assert_close(run(x), model(x))


# Writes.


def set_data(w: Tensor) -> None:
    w.data = torch.zeros(5, 6)


def set_row(w: Tensor) -> None:
    w[0] = 1


def add_in_place(w: Tensor) -> None:
    w += 1


def freeze(w: Tensor) -> None:
    w.requires_grad = False


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zeros_": nn.init.zeros_,
    "normal_": nn.init.normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "orthogonal_": nn.init.orthogonal_,
    "mul_": lambda w: w.mul_(2),
    "+=": add_in_place,
    "setitem": set_row,
    "out": lambda w: torch.add(torch.ones(5, 6), 1, out=w),
    "list": lambda w: torch._foreach_mul_([w], 2.0),
    "data": lambda w: w.data.clamp_(0),
    "row of data": lambda w: set_row(w.data),
    "data =": set_data,
    "view": lambda w: w.view(-1).zero_(),
    "transposed": lambda w: w.t().fill_(1),
    "slice": lambda w: w[1:, 2].zero_(),
    "detached": lambda w: w.detach().zero_(),
    "requires_grad_": lambda w: w.requires_grad_(False),
    "requires_grad =": freeze,
    "parameter": nn.Parameter,
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_raise(name: str, mode: Any, layer: Any) -> None:
    before = layer.weight.clone()
    with mode():
        weight = layer.weight
        with pytest.raises(
            RuntimeError, match="computed from its factors and cannot be changed: change down"
        ):
            WRITES[name](weight)
        assert torch.equal(weight, before)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", WRITES)
def test_writes_raise_where_torch_records_gradients(name: str, layer: Any) -> None:
    with pytest.raises(RuntimeError):  # some are torch's own errors: not a leaf
        WRITES[name](layer.weight)


def test_assignment_raises(layer: Any) -> None:
    before = plain(layer).detach().clone()
    embedding = nn.Embedding(5, 6)  # a head is tied to it by such an assignment
    for value in (nn.Parameter(torch.zeros(5, 6)), embedding.weight, torch.zeros(5, 6), None):
        with pytest.raises(
            RuntimeError, match="computed from its factors and cannot be changed: change down"
        ):
            layer.weight = value
    assert torch.equal(plain(layer), before)
    layer.register_parameter("scale", nn.Parameter(torch.ones(5)))  # other parameters may be added
    assert {name for name, _ in layer.named_parameters(recurse=False)} == {"scale"}
