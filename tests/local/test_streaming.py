"""Fragments and delayed averages in one process: how a model is split, state, invalid arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from local_workers import build, close, diloco, sgd, train
from torch import Tensor, nn, optim

import pufferfish as pf
from nested import equal
from pufferfish.compression import TopK
from pufferfish.local.fragments import split_by_depth
from pufferfish.local.local_steps import LocalSteps


def names_in(local: LocalSteps) -> list[list[str]]:
    return [part["names"] for part in local.state_dict()["fragments"]]


def blocks(count: int, size: int = 8, **others: int) -> dict[str, int]:
    return others | {
        f"blocks.{i}.{name}": size // 2 for i in range(count) for name in ("fc.weight", "out.weight")
    }


def depths(names: list[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks")})


def test_equal_blocks_are_dealt_out_in_turn() -> None:
    assert [depths(f) for f in split_by_depth(blocks(8), 4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_large_tensor_gets_fewer_blocks() -> None:
    split = split_by_depth(blocks(6, **{"embed.weight": 16}), 4)
    assert split[0] == ["embed.weight"]
    assert [len(depths(f)) for f in split] == [0, 2, 2, 2]


def test_finer_parts_where_blocks_are_too_few_or_too_unequal() -> None:
    nested = {f"0.layers.{i}.weight": 10 for i in range(4)} | {"1.weight": 1}
    assert sorted(map(len, split_by_depth(nested, 2))) == [2, 3]
    one = {"rnn.weight_ih": 10, "rnn.weight_hh": 10, "rnn.bias": 1}
    assert sorted(map(len, split_by_depth(one, 2))) == [1, 2]
    for k in range(1, 8):
        sizes = {f"layers.{i}.w": (i * 7919) % 13 for i in range(7)}
        split = split_by_depth(sizes, k)
        assert all(split)
        assert sorted(name for names in split for name in names) == sorted(sizes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def test_every_tensor_is_in_one_fragment() -> None:
    """Tied weights once, frozen ones never, buffers with their layer."""
    torch.manual_seed(0)
    model = Tied()
    local = LocalSteps(4, fragments=3, delay=2, outer=diloco)
    local.start(model)
    names = names_in(local)
    expected = {*dict(model.named_parameters()), "norm.running_mean", "norm.running_var"}
    assert sorted(n for part in names for n in part) == sorted(
        expected - {"blocks.1.weight", "blocks.1.bias"}
    )
    assert any({"norm.weight", "norm.running_var"} <= {*part} for part in names)
    frozen, optimizer = model.blocks[1].weight.clone(), sgd(model.parameters())
    for _ in range(9):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.blocks[1].weight, frozen)


def test_error_feedback_follows_tensors_to_other_fragments() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(4)], nn.Linear(40, 100, bias=False))
    local = LocalSteps(2, fragments=2, delay=1, method=TopK(0.1))
    local.start(model)
    optimizer = sgd(model.parameters())
    for _ in range(4):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        local.step(model)
    local.sync(model)
    before, split = local.state_dict()["fragments"], names_in(local)
    pf.factorize_(model, pf.plan(model, rank=pf.Fixed(4), keep=["0", "1", "2", "3"]), optimizer)
    local.start(model)
    after = local.state_dict()["fragments"]
    place = {name: i for i, names in enumerate(split) for name in names}
    kept = {name: x for part in before for name, x in part["engine"]["own"].items() if name != "4.weight"}
    assert any(place.get(name, i) != i for i, names in enumerate(names_in(local)) for name in names)
    assert kept.keys() == {f"{i}.weight" for i in range(4)}
    equal({name: x for part in after for name, x in part["engine"]["own"].items()}, kept)
    train_further = [local.step(model) for _ in range(4)]
    assert any(train_further)


def test_a_model_in_bf16_keeps_its_anchor_in_fp32() -> None:
    """Outer steps below the resolution of bf16 add up; the mixture is computed in fp32."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    local = LocalSteps(2, delay=1, mixing=0.5, outer=lambda params: optim.SGD(params, lr=1e-3))
    local.start(model)
    anchor, x, flight = torch.ones(()), torch.ones((), dtype=torch.bfloat16), torch.zeros(())
    for step in range(1, 41):
        with torch.no_grad():
            model.weight -= 0.125
        x = x - 0.125
        if step % 2 == 0:
            flight = anchor.bfloat16().float() - x.float()
        elif step > 1:
            anchor = anchor - 1e-3 * flight
            x = (0.5 * x.float() + 0.5 * anchor).bfloat16()
        local.step(model)
        assert model.weight.item() == x.item()
    assert local.state_dict()["anchor"]["weight"].item() == pytest.approx(anchor.item())


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
        local = LocalSteps(4, outer=diloco, fragments=2, delay=3, method=TopK(0.1))
        local.start(model)
        optimizer = sgd(model.parameters())
        for step in range(14):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step(model)
        local.sync(model)
        ends.append(model.cpu())
    close(ends[0], ends[1])


def refused() -> Iterator[tuple[Callable[[], object], str]]:
    yield lambda: LocalSteps(4, fragments=0), "fragments=0 is not a number of fragments"
    yield lambda: LocalSteps(4, fragments=5), "fragments=5 exceeds h=4"
    yield lambda: LocalSteps(4, delay=-1), "delay=-1 must be at least 0"
    yield lambda: LocalSteps(4, delay=4), "delay=4 must be at least 0 and below h=4"
    yield lambda: LocalSteps(4, delay=1, mixing=1.0), "mixing=1.0 must be at least 0 and below 1"
    yield lambda: LocalSteps(4, mixing=0.5), "0 without a delay"
    yield lambda: LocalSteps(4, fragments=3).start(nn.Linear(2, 2)), "the model has only 2 tensors"


@pytest.mark.parametrize(("act", "message"), list(refused()))
def test_invalid_arguments_are_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_state_of_another_schedule_is_refused() -> None:
    model = build()
    local, optimizer = LocalSteps(4, fragments=2, delay=2), sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(3), 0)
    state = local.state_dict()
    with pytest.raises(ValueError, match="saved with fragments=2, now fragments=1"):
        LocalSteps(4, delay=2).load_state_dict(state)
    with pytest.raises(
        ValueError, match="saved with h=4, delay=2 and averages on their way, now h=4, delay=1"
    ):
        LocalSteps(4, fragments=2, delay=1).load_state_dict(state)
    local.sync(model)
    other = LocalSteps(6, fragments=2, delay=1)
    other.load_state_dict(local.state_dict())
    train(other, model, optimizer, range(3, 8), 0)
