"""Groups of channels, and removing them from a model and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import REFERENCES, VGG19, resnet18, resnet50
from pufferfish.lab.rivals.channels import ChannelGroup, channel_groups, remove_channels_
from pufferfish.lab.tasks.digits import Digits
from pufferfish.planning import totals
from pufferfish.planning.profile import profile

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: resnet18(channels=8), (2, 3, 32, 32)),
    "vgg19": (lambda: VGG19(channels=8), (2, 3, 32, 32)),
    "vgg19, one layer on top": (lambda: VGG19(channels=8, fcs=1), (2, 3, 32, 32)),
    "digits": (lambda: Digits(width=8).build(), (2, 1, 8, 8)),  # a channel is four inputs of the linear layer
}
Kept = list[tuple[ChannelGroup, Tensor]]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], steps: int = 2
) -> None:
    """Statistics, scales and moments that are nobody's default."""
    model.train()
    for _ in range(steps):
        F.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0])).backward()
        optimizer.step()
        optimizer.zero_grad()


def some(model: nn.Module) -> Kept:
    """About half of the channels of every group that has a batch norm, at random."""
    found = [group for group in channel_groups(model) if group.norms and not group.fixed]
    return [(g, torch.randperm(g.size)[: (g.size + 1) // 2].sort().values) for g in found]


@torch.no_grad()
def silence_(model: nn.Module, kept: Kept) -> None:
    """Make the others zero: what writes them, and what batch norms make of that."""
    for group, index in kept:
        gone = torch.ones(group.size, dtype=torch.bool)
        gone[index] = False
        for name in group.writers + group.norms:
            layer = model.get_submodule(name)
            layer.weight[gone] = 0
            if layer.bias is not None:
                layer.bias[gone] = 0


@pytest.mark.parametrize("name", MODELS)
def test_removing_silent_channels_changes_nothing(name: str) -> None:
    build, shape = MODELS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # fewer channels draw fewer random numbers
    trained(model, optimizer, shape)
    kept = some(model)
    silence_(model, kept)
    x = torch.randn(shape)
    costs = totals(model, profile(model, x))
    expected = {mode: copy.deepcopy(model).train(mode)(x) for mode in (True, False)}
    remove_channels_(model, kept, optimizer)
    for mode, wanted in expected.items():
        torch.testing.assert_close(copy.deepcopy(model).train(mode)(x), wanted, rtol=1e-4, atol=1e-5)
    smaller = totals(model, profile(model, x))
    assert smaller.parameters < 0.5 * costs.parameters
    assert smaller.forward_macs is not None
    assert costs.forward_macs is not None
    assert smaller.forward_macs < 0.5 * costs.forward_macs
    trained(model, optimizer, shape)
    model.eval()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    fresh = build()
    remove_channels_(fresh, kept)
    fresh.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizer_goes_on_as_if_the_channels_had_never_been(kind: str) -> None:
    """A step of the large network whose silent channels get no gradient is the step of the small one."""
    build, shape = MODELS["resnet18"]
    model = build()
    settings = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.1, **settings)
    trained(model, optimizer, shape)
    kept = some(model)
    silence_(model, kept)
    small, small_optimizer = copy.deepcopy((model, optimizer))
    before = list(small.parameters())
    remove_channels_(small, kept, small_optimizer)
    x, y = torch.randn(shape), torch.arange(shape[0])
    for net, own in ((model, optimizer), (small, small_optimizer)):
        F.cross_entropy(net(x), y).backward()
        own.step()
    remove_channels_(model, kept)  # what is left of the large one after its step
    for (name, p), q in zip(small.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4, msg=name)
    assert [p.shape for g in small_optimizer.param_groups for p in g["params"]] == [
        p.shape for p in small.parameters()
    ]
    assert small_optimizer.state.keys() == set(small.parameters())
    assert not any(p is q for p in before for q in small.parameters() if p.dim() == 4)


def test_layout_and_frozen_parameters_stay() -> None:
    model = resnet18(channels=8).to(memory_format=torch.channels_last)
    model.conv1.weight.requires_grad_(False)
    remove_channels_(model, some(model))
    assert model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.layer1[0].conv1.weight.is_contiguous()
    assert not model.conv1.weight.requires_grad


def test_channels_that_are_added_are_one_group() -> None:
    with torch.device("meta"):
        model = resnet50()
    stage = next(group for group in channel_groups(model) if "layer2.0.downsample.1" in group.norms)
    assert stage.norms == [
        "layer2.0.bn3",
        "layer2.0.downsample.1",
        "layer2.1.bn3",
        "layer2.2.bn3",
        "layer2.3.bn3",
    ]
    assert stage.size == 512
    assert stage.readers[-1] == "layer3.0.downsample.0"
    assert sum(len(g.writers) for g in channel_groups(model)) == 54  # every layer makes one group's channels


class Odd(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.odd = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return torch.cat([x, self.odd(x)], 1) if isinstance(self.odd, nn.Identity) else self.odd(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "odd: channels of a convolution with 2 groups"),
        (nn.PReLU(4), "odd: PReLU is not supported"),
        (nn.Linear(8, 8), "odd: its input must have one value per channel"),
        (nn.Identity(), "cat is not supported"),
    ],
)
def test_unsupported_layers_are_named(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        channel_groups(Odd(layer))


@pytest.mark.parametrize(
    ("name", "layer"), [("lstm", "embedding"), ("transformer", "embedding"), ("gpt", "")]
)
def test_other_networks_are_refused(name: str, layer: str) -> None:
    with torch.device("meta"):
        model = REFERENCES[name].build()
    with pytest.raises(ValueError, match=f"{layer}.*: .*cannot be"):
        channel_groups(model)


def test_low_rank_layers_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32))
    pf.factorize_(model, pf.plan(model, rank=0.25))
    with pytest.raises(ValueError, match=r"0: channels of a low-rank layer .* pf\.merge_"):
        channel_groups(model)


def test_shared_layers_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match="2: it is used twice, or shares its weight with 0"):
        channel_groups(model)


def test_optimizer_state_without_channels_is_refused_before_anything_changes() -> None:
    build, shape = MODELS["digits"]
    model = build()
    optimizer = torch.optim.Adafactor(model.parameters())
    trained(model, optimizer, shape)
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"conv1\.weight: Adafactor keeps 'row_var'"):
        remove_channels_(model, some(model), optimizer)
    assert {name: p.shape for name, p in model.named_parameters()} == before
