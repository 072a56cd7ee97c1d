"""Rivals driven through a recipe, on real digits: what a training loop does with them, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pufferfish.lab.rivals.rival_by_name import EarlyBirdRun, LotteryRun, is_rival, make
from pufferfish.lab.tasks.digits import Digits
from pufferfish.lab.tasks.task import Recipe
from pufferfish.lab.train import optimizer as of_recipe


def trained(word: str, epochs: int) -> tuple[Any, float, list[int], list[float]]:
    """The rival, its accuracy, the epochs at whose start the model changed, and the learning rates of every update."""
    torch.manual_seed(0)
    task = Digits(width=8)
    recipe = Recipe(epochs=epochs, batch=128, lr=0.1, warm_up=0.2, nesterov=True, weight_decay=5e-4)
    data = task.load(None)
    model: nn.Module = task.build()
    optimizer = of_recipe(model, recipe)
    an_epoch = task.steps(data, recipe.batch)
    rival = make(word, model, optimizer, epochs=epochs, an_epoch=an_epoch)
    changed, rates, step = [], [], 0
    for epoch in range(rival.epochs):
        if rival.begin_epoch(epoch):
            changed.append(epoch)
        generator = torch.Generator().manual_seed(epoch)
        model.train()
        for images in task.batches(data, "train", recipe.batch, generator=generator):
            rates.append(recipe.rate(*rival.schedule(step)))
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
    assert isinstance(rival, LotteryRun)
    assert rival.epochs == 4 + 3 + 3
    assert changed == [4, 7]
    an_epoch = len(rates) // 10
    assert rates[4 * an_epoch :] == rates[an_epoch : 4 * an_epoch] * 2  # from the rewound step on, twice
    cost = rival.ticket.cost(epoch=an_epoch)
    assert [r.steps for r in cost.rounds] == [4 * an_epoch, 3 * an_epoch, 3 * an_epoch]
    assert cost.epochs == 10
    assert rival.ticket.weights == pytest.approx(0.64 * rival.ticket.total, abs=1)
    assert rival.parameters == sum(int(p.count_nonzero()) for p in rival.ticket.model.parameters())
    assert rival.report.startswith("Lottery ticket, round 2 of 2: ")
    assert accuracy > 90


def test_early_bird() -> None:
    rival, accuracy, changed, rates = trained("early-bird-0.5", 8)
    assert isinstance(rival, EarlyBirdRun)
    assert changed == [4]  # in the middle at the latest, and five masks take longer
    assert rates[-1] < rates[len(rates) // 2]  # one schedule over all of it
    assert rival.report.startswith("Early-Bird ticket drawn after 4 epochs: ")
    assert rival.parameters < 0.6 * sum(p.numel() for p in Digits(width=8).build().parameters())
    assert accuracy > 90


def test_words() -> None:
    assert not is_rival("dense")
    assert not is_rival("early-birds")
    for word in (
        "early-bird-2",
        "early-bird-0",
        "lottery-ticket-0",
        "lottery-ticket-0.5",
        "early-bird-0.3.1",
    ):
        with pytest.raises(ValueError, match=r"^'(early-bird|lottery-ticket)-.*': after .* as in "):
            is_rival(word)
    with pytest.raises(ValueError, match="'dense' is none of lottery-ticket, early-bird"):
        make("dense", nn.Linear(2, 2), None, epochs=1, an_epoch=1)
