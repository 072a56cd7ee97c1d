"""Pruning methods in a training loop on real digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pufferfish.lab.rivals.pruning_by_name import (
    EarlyBirdChange,
    LotteryTicketChange,
    build_pruning_change,
    is_pruning_method,
)
from pufferfish.lab.tasks import Recipe
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.train import build_optimizer


def trained(word: str, epochs: int) -> tuple[Any, float, list[int], list[float]]:
    """Return the change, its accuracy, the epochs at whose start the model changed, and the learning rate of every update."""
    torch.manual_seed(0)
    task = Digits(width=8)
    recipe = Recipe(epochs=epochs, batch=128, lr=0.1, warm_up=0.2, nesterov=True, weight_decay=5e-4)
    data = task.load(None)
    model: nn.Module = task.build()
    optimizer = build_optimizer(model, recipe)
    steps_per_epoch = task.steps(data, recipe.batch)
    rival = build_pruning_change(word, model, optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch)
    changed, rates, step = [], [], 0
    for epoch in range(rival.epochs):
        if rival.begin_epoch(epoch):
            changed.append(epoch)
        generator = torch.Generator().manual_seed(epoch)
        model.train()
        for images in task.batches(data, "train", recipe.batch, generator=generator):
            rates.append(recipe.lr_at(*rival.schedule_position(step)))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            task.loss(model, images, recipe).backward()
            optimizer.step()
            optimizer.zero_grad()
            rival.after_step()
            step += 1
    return rival, task.evaluate(model, data, "test")["accuracy"], changed, rates


def test_lottery_ticket() -> None:
    rival, accuracy, changed, rates = trained("lottery-ticket-2", 4)
    assert isinstance(rival, LotteryTicketChange)
    assert rival.epochs == 4 + 3 + 3
    assert changed == [4, 7]
    steps_per_epoch = len(rates) // 10
    assert (
        rates[4 * steps_per_epoch :] == rates[steps_per_epoch : 4 * steps_per_epoch] * 2
    )  # from the rewound step on, twice
    assert [r.steps for r in rival.pruner.trained()] == [
        4 * steps_per_epoch,
        3 * steps_per_epoch,
        3 * steps_per_epoch,
    ]
    assert rival.pruner.weights == pytest.approx(0.64 * rival.pruner.total, abs=1)
    assert rival.parameters == sum(int(p.count_nonzero()) for p in rival.pruner.model.parameters())
    assert rival.summary.startswith("Lottery ticket, round 2 of 2: ")
    assert accuracy > 90


def test_early_bird() -> None:
    rival, accuracy, changed, rates = trained("early-bird-0.5", 8)
    assert isinstance(rival, EarlyBirdChange)
    assert changed == [4]  # in the middle at the latest, and five masks take longer
    assert rates[-1] < rates[len(rates) // 2]  # one schedule over all of it
    assert rival.summary.startswith("Early-Bird ticket drawn after 4 epochs: ")
    assert rival.parameters < 0.6 * sum(p.numel() for p in Digits(width=8).build().parameters())
    assert accuracy > 90


def test_words() -> None:
    assert not is_pruning_method("dense")
    assert not is_pruning_method("early-birds")
    for word in (
        "early-bird-2",
        "early-bird-0",
        "lottery-ticket-0",
        "lottery-ticket-0.5",
        "early-bird-0.3.1",
    ):
        with pytest.raises(ValueError, match=r"^'(early-bird|lottery-ticket)-.*': after .* as in "):
            is_pruning_method(word)
    with pytest.raises(ValueError, match="'dense' is none of lottery-ticket, early-bird"):
        build_pruning_change("dense", nn.Linear(2, 2), None, epochs=1, steps_per_epoch=1)
