"""Early-Bird tickets: the L1 penalty, masks that settle, and channels removed on all workers and across a restart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.lab.models import VGG19, resnet18
from pufferfish.lab.rivals.channels import L1Penalty, prunable_groups
from pufferfish.lab.rivals.pruning import EarlyBird
from pufferfish.lab.tasks.digits import Digits


def build() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(channels=8)


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, **more)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def update_digits(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}


def test_scales_are_pulled_as_a_penalty_in_the_loss_would() -> None:
    model, other = build(), build()
    optimizer, plain = sgd(model), sgd(other)
    L1Penalty(model, prunable_groups(model), [optimizer], 0.01)
    for step in range(3):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        penalty = 0.01 * sum(scale.abs().sum() for scale in scales(other).values())
        (F.cross_entropy(other(x), y) + penalty).backward()
        for own in (optimizer, plain):
            own.step()
            own.zero_grad()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_the_smallest_scales_go_together() -> None:
    """Against the obvious way: the mean over norms that are added, sorted over all groups."""
    model = build()
    optimizer = sgd(model)
    bird = EarlyBird(model, optimizer, ratio=0.4, multiple=1, latest=1)
    update(model, optimizer, 0)
    for scale in scales(model).values():
        scale.data.uniform_(-1, 1)
    found = {name: scale.detach().abs() for name, scale in scales(model).items()}
    together = [["layer1.0.bn2", "layer1.1.bn2"]]
    together += [[f"layer{i}.0.bn2", f"layer{i}.0.downsample.1", f"layer{i}.1.bn2"] for i in (2, 3, 4)]
    together += [[name] for name in found if not any(name in names for names in together)]
    score = {names[0]: torch.stack([found[n] for n in names]).mean(0).tolist() for names in together}
    flat = sorted((x, name, i) for name, xs in score.items() for i, x in enumerate(xs))
    gone = {(name, i) for _, name, i in flat[: round(0.4 * len(flat))]}
    assert bird.begin_epoch(1)
    assert bird.ticket is not None
    assert {(n, i) for n, size in bird.ticket.sizes.items() for i in range(size)} - {
        (n, i) for n, kept in bird.ticket.kept.items() for i in kept
    } == gone
    for names in together:
        for name in names:
            assert model.get_submodule(name).num_features == len(bird.ticket.kept[names[0]])
    update(model, optimizer, 1)


@pytest.mark.parametrize(
    "net", [lambda: resnet18(channels=32), lambda: VGG19(channels=32)], ids=["resnet18", "vgg19"]
)
def test_whole_multiples_are_left(net: Any) -> None:
    model = net()
    bird = EarlyBird(model, sgd(model), ratio=0.7, latest=1)
    for scale in scales(model).values():
        scale.data.uniform_(0, 1)
    whole = pf.planning.totals(model, pf.planning.profile(model, torch.randn(1, 3, 32, 32)))
    assert bird.begin_epoch(1)
    assert bird.ticket is not None
    assert all(len(kept) % 8 == 0 and kept for kept in bird.ticket.kept.values())
    share = sum(map(len, bird.ticket.kept.values())) / sum(bird.ticket.sizes.values())
    assert 0.27 < share < 0.33
    small = pf.planning.totals(model, pf.planning.profile(model, torch.randn(1, 3, 32, 32)))
    assert bird.ticket.parameters == (whole.parameters, small.parameters)
    assert small.parameters < 0.3 * whole.parameters
    assert small.forward_macs < 0.3 * whole.forward_macs  # type: ignore[operator]


def test_drawn_when_the_last_masks_are_alike() -> None:
    model = build()
    bird = EarlyBird(model, sgd(model), ratio=0.5, multiple=1)
    sizes = [group.size for group in bird._groups]
    half = sum(sizes) // 2
    value = (torch.randperm(2 * half).float() + 1).tolist()
    masks: list[list[bool]] = []
    for epoch, moved in enumerate(
        [0, 0, 20, 3, 1, 1, 1]
    ):  # so many channels go over the threshold, and as many back
        order = sorted(range(2 * half), key=value.__getitem__)
        for a, b in zip(order[half - moved : half], order[half : half + moved], strict=True):
            value[a], value[b] = value[b], value[a]
        for group, part in zip(bird._groups, torch.tensor(value).split(sizes), strict=True):
            for name in group.norms:
                scales(model)[name].data.copy_(part)
        drawn = bird.begin_epoch(epoch)
        assert not bird.begin_epoch(epoch)  # asked twice, counted once
        if epoch:
            masks = [*masks, [x > half for x in value]][-5:]
        far = [sum(x != y for x, y in zip(*two, strict=True)) / (2 * half) for two in combinations(masks, 2)]
        assert bird.distances == pytest.approx(far)
        assert drawn == (len(masks) == 5 and max(far) < 0.1)
    assert bird.ticket is not None
    assert bird.ticket.epoch == 6  # at 5 the first mask was still too far away


def plain(rank: int, size: int, compressed: bool = False) -> None:
    model = Digits(width=8).build()
    optimizer = sgd(model)
    ddp = DDP(model)
    if compressed:
        pf.compress(ddp, pf.compression.PowerSGD(rank=2), optimizer=optimizer)
    bird = EarlyBird(ddp, optimizer, ratio=0.5, multiple=1, latest=2)
    for epoch in range(4):
        assert bird.begin_epoch(epoch) == (epoch == 2)
        update_digits(ddp, optimizer, 10 * epoch + rank)
    assert bird.ticket is not None
    for name, p in model.named_parameters():
        assert same_everywhere(p), name


def compressed(rank: int, size: int) -> None:
    plain(rank, size, compressed=True)


def other_settings(rank: int, size: int) -> None:
    bird = EarlyBird(DDP(Digits(width=8).build()), [], ratio=0.3 + 0.1 * rank)
    with pytest.raises(RuntimeError, match="differ from rank 0 in epoch or settings"):
        bird.begin_epoch(1)


@pytest.mark.parametrize("case", [plain, compressed, other_settings])
def test_all_workers_remove_the_same_channels(case: Callable[..., None]) -> None:
    in_processes(case, 2)


def test_compiled_model_stays_the_same_object() -> None:
    model = Digits(width=8).build()
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    bird = EarlyBird(compiled, optimizer, multiple=1, latest=1)
    x = torch.randn(4, 1, 8, 8)
    for epoch in range(3):
        bird.begin_epoch(epoch)
        update_digits(compiled, optimizer, epoch)
    assert bird.ticket is not None
    torch.testing.assert_close(compiled.eval()(x), copy.deepcopy(model).eval()(x))


def test_nonsense_is_refused() -> None:
    model = build()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"ratio=1.0 is not between 0 and 1"):
        EarlyBird(model, optimizer, ratio=1.0)
    with pytest.raises(ValueError, match="Sequential: no channels are scaled by a batch norm"):
        EarlyBird(Digits(model="mlp").build(), optimizer)
    bird = EarlyBird(model, optimizer, multiple=1, latest=1)
    scales(model)["layer2.0.bn1"].data[0] = torch.nan
    with pytest.raises(ValueError, match=r"layer2\.0\.bn1: a scale of its channels is inf or NaN"):
        bird.begin_epoch(1)
    scales(model)["layer2.0.bn1"].data[0] = 1.0
    whole = bird.state_dict()
    assert bird.begin_epoch(1)
    with pytest.raises(ValueError, match="this model lacks channels"):
        bird.load_state_dict(whole)
    wide = resnet18(channels=16)
    with pytest.raises(ValueError, match="belongs to another model"):
        EarlyBird(wide, sgd(wide)).load_state_dict(bird.state_dict())
