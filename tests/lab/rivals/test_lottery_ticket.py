"""Lottery tickets: the smallest weights are pruned and stay zero, are rewound, resumed, and the same on all workers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from processes import in_processes, same_everywhere
from pufferfish.lab.rivals.lottery_ticket import LotteryTicket
from pufferfish.layers.names import unwrap

STEPS = 6


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(54, 5),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(5, (8,), generator=generator)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, ticket: LotteryTicket, step: int, *of: int
) -> None:
    x, y = batch(step, *of)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    ticket.step()


def rounds(model: nn.Module, optimizer: torch.optim.Optimizer, ticket: LotteryTicket, *of: int) -> None:
    while True:
        for step in range(ticket.start, STEPS):
            update(model, optimizer, ticket, step, *of)
            assert_pruned(ticket)
        if not ticket.next_round():
            return
        assert_pruned(ticket)


def assert_pruned(ticket: LotteryTicket) -> None:
    parameters = dict(unwrap(ticket.model).named_parameters())
    for name, mask in ticket.masks().items():
        assert torch.equal(parameters[name] == 0, ~mask), name


def smallest(weights: dict[str, list[float]], fraction: float) -> set[tuple[str, int]]:
    """The obvious way."""
    left = sorted((abs(x), name, i) for name, xs in weights.items() for i, x in enumerate(xs) if x != 0)
    return {(name, i) for _, name, i in left[: round(fraction * len(left))]}


def test_the_smallest_are_pruned_and_the_others_rewound() -> None:
    model = build()
    optimizer = sgd(model)
    initial = copy.deepcopy(model.state_dict())
    ticket = LotteryTicket(model, optimizer, rounds=3, fraction=0.3)
    gone: set[tuple[str, int]] = set()
    for left in (3, 2, 1):
        for step in range(STEPS):
            update(model, optimizer, ticket, step)
        gone |= smallest({n: p.flatten().tolist() for n, p in model.named_parameters() if p.dim() > 1}, 0.3)
        assert ticket.next_round()
        masks = ticket.masks()
        assert {(n, i) for n, m in masks.items() for i, x in enumerate(m.flatten().tolist()) if not x} == gone
        assert ticket.round == 4 - left
        for name, x in model.state_dict().items():
            assert torch.equal(x, initial[name] * masks[name] if name in masks else initial[name]), name
        assert not optimizer.state
    assert not ticket.next_round()


OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rewind", [0, 2])
def test_pruned_weights_stay_zero(name: str, rewind: int) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model)
    ticket = LotteryTicket(model, optimizer, rounds=2, rewind=rewind)
    rounds(model, optimizer, ticket)
    assert ticket.weights < 0.65 * ticket.total


def test_gradients_of_pruned_weights_are_zero_before_clipping() -> None:
    model = build()
    optimizer = sgd(model)
    ticket = LotteryTicket(model, optimizer, rounds=1, fraction=0.5)
    update(model, optimizer, ticket, 0)
    ticket.next_round()
    x, y = batch(1)
    F.cross_entropy(model(x), y).backward()
    for name, mask in ticket.masks().items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        assert grad[~mask].count_nonzero() == 0 < grad[mask].count_nonzero()


def test_rewound_to_an_early_step_with_its_momentum() -> None:
    model = build()
    optimizer = sgd(model)
    ticket = LotteryTicket(model, optimizer, rounds=1, rewind=3)
    for step in range(STEPS):
        update(model, optimizer, ticket, step)
        if step == 2:
            early = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    assert ticket.next_round()
    assert ticket.start == 3
    masks = ticket.masks()
    for (name, x), old in zip(model.state_dict().items(), early[0].values(), strict=True):
        assert torch.equal(x, old * masks[name] if name in masks else old)
    for (name, p), old in zip(model.named_parameters(), early[1].values(), strict=True):
        buffer = old["momentum_buffer"]
        wanted = buffer * masks[name] if name in masks else buffer
        assert torch.equal(optimizer.state[p]["momentum_buffer"], wanted)


def equal_to_one_process(rank: int, size: int) -> None:
    model, single = build(), build()
    for net in (model, single):
        net[1].eval()  # batch statistics of a shard are not those of the batch
    ddp = DDP(model)
    optimizer, single_optimizer = sgd(model), sgd(single)
    ticket = LotteryTicket(ddp, optimizer, rounds=2, rewind=2)
    rounds(ddp, optimizer, ticket, rank, size)
    reference = LotteryTicket(single, single_optimizer, rounds=2, rewind=2)
    rounds(single, single_optimizer, reference)
    for (name, mask), expected in zip(ticket.masks().items(), reference.masks().values(), strict=True):
        assert same_everywhere(mask.to(torch.uint8)), name
        assert torch.equal(mask, expected), name
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def other_settings(rank: int, size: int) -> None:
    model = build()
    ticket = LotteryTicket(DDP(model), sgd(model), rounds=1 + rank)
    ticket.step()
    with pytest.raises(RuntimeError, match="differ from rank 0 in round or settings"):
        ticket.next_round()


@pytest.mark.parametrize("case", [equal_to_one_process, other_settings])
def test_one_mask_for_all_workers(case: Callable[..., None]) -> None:
    in_processes(case, 2)


def test_nonsense_is_refused() -> None:
    model = build()
    optimizer = sgd(model)
    for settings, message in [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"fraction": 1.0}, r"fraction=1.0 is not between 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            LotteryTicket(model, optimizer, **settings)  # type: ignore[arg-type]
    ticket = LotteryTicket(model, optimizer, rewind=3)
    ticket.step()
    with pytest.raises(ValueError, match="rewind=3, but this round had only 1 updates"):
        ticket.next_round()
    with pytest.raises(ValueError, match="no weights of two or more dimensions"):
        LotteryTicket(nn.BatchNorm2d(4), optimizer)
    other = LotteryTicket(model, optimizer)
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = torch.nan
    other.step()
    with pytest.raises(ValueError, match=r"3\.weight: it contains inf or NaN; nothing was pruned"):
        other.next_round()
    assert other.weights == other.total
