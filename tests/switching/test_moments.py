"""The moments a switch can wait for."""

import functools
import math
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.switching.moments import AtEpoch, AtFraction, AtStep, Position, RanksSettle, moment_text


@pytest.mark.parametrize(
    ("when", "before", "then"),
    [
        (AtEpoch(3), Position(epoch=2), Position(epoch=3)),
        (AtStep(100), Position(step=99), Position(step=100)),
        (AtFraction(0.25), Position(epoch=4, total=20), Position(epoch=5, total=20)),
        (AtFraction(0.25), Position(step=24, total=100), Position(step=25, total=100)),
    ],
)
def test_stated_moments(when: pf.AtEpoch, before: Position, then: Position) -> None:
    assert not when(before)
    assert when(then)


@pytest.mark.parametrize(
    ("when", "at", "wanted"),
    [
        (AtEpoch(3), Position(step=5), "epoch="),
        (AtStep(3), Position(epoch=5), "step="),
        (AtFraction(0.5), Position(epoch=5), "total="),
        (AtFraction(0.5), Position(total=5), "epoch= or step="),
    ],
)
def test_a_missing_position_is_asked_for(when: pf.AtEpoch, at: Position, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        when(at)


@pytest.mark.parametrize("share", [-0.1, 80, math.nan])
def test_a_share_is_no_percentage(share: float) -> None:
    with pytest.raises(ValueError, match="is not a number between 0 and 1"):
        AtFraction(share)


def flat_after(history: list[dict[str, float]], when: RanksSettle) -> int:
    """After how many observations the ranks count as settled."""
    return next(n for n in range(len(history) + 1) if when.settled(history[:n]))


def test_ranks_settle_when_their_changes_stay_small() -> None:
    falling = [{"a": 40 * 0.8**t + 10, "b": 20.0} for t in range(100)]
    default, loose = RanksSettle(), RanksSettle(window=5, span=5, tolerance=0.33)
    assert flat_after(falling, loose) < flat_after(falling, default) < 100
    # The obvious way: mean change of the smoothed ranks over the last eleven observations.
    n = flat_after(falling, default)
    smooth = [falling[0]["a"]]
    for seen in falling[1:n]:
        smooth.append(smooth[-1] + (seen["a"] - smooth[-1]) * 2 / 16)
    changes = [abs(y - x) / 2 for x, y in pairwise(smooth)]  # b does not move
    assert sum(changes[-11:]) / 11 <= 0.1 < sum(changes[-12:-1]) / 11


def test_ranks_are_looked_at_every_so_often() -> None:
    assert [epoch for epoch in range(10) if RanksSettle(every=4).due(Position(epoch=epoch))] == [0, 4, 8]
    assert RanksSettle(every=50).due(Position(step=100))
    assert all(RanksSettle().due(Position(epoch=epoch, step=7 * epoch, total=600)) for epoch in range(10))
    for total, steps in ((600, [0, 10, 20]), (30, [*range(25)]), (None, [0])):
        at = [Position(step=step, total=total) for step in range(25)]
        assert [x.step for x in at if RanksSettle().due(x)] == steps
    with pytest.raises(ValueError, match="epoch= or step="):
        RanksSettle().due(Position())


def test_a_third_of_the_run_is_the_latest_moment() -> None:
    for total in (3, 30, 31, 100):
        late = [n for n in range(total) if RanksSettle().overdue(Position(step=n, total=total))]
        assert late == [n for n in range(total) if 3 * n >= total]


def test_layers_that_were_frozen_on_the_way_do_not_count() -> None:
    history = [{"a": 4.0, "b": 9.0 - i} for i in range(6)] + [{"a": 4.0}] * 12
    assert RanksSettle().settled(history)


class Mine:
    def __call__(self, at: Position) -> bool:
        return True


@pytest.mark.parametrize("moment", [lambda at: True, functools.partial(max, 1), Mine(), Mine().__call__])
def test_texts_have_no_addresses(moment: Any) -> None:
    """Workers compare them."""
    for text in (moment_text(moment), moment_text(RanksSettle(latest=moment))):
        assert " at 0x" not in text


def test_a_total_in_another_unit_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switch = pf.Switch(rank=8, when=pf.AtFraction(0.5))
    calls = functools.partial(switch.step, model, optimizer, total=3)  # epochs
    assert [calls(step=step) for step in range(4)] == [False, False, True, False]
    with pytest.warns(
        UserWarning, match=r"got step=4 of total=3; pass the length of the run in steps as total="
    ):
        calls(step=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(step=5)


def test_a_function_is_asked_at_each_call() -> None:
    """Without counters, or several times in one epoch, positions are equal and the answer may not be."""
    for position in ({}, {"epoch": 0}):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answers, back = iter([False, False, True]), iter([False, True])
        switch = pf.Switch(rank=8, when=lambda at, a=answers: next(a), back=lambda at, b=back: next(b))
        changes = [switch.step(model, optimizer, **position) for _ in range(6)]
        assert changes == [False, False, True, False, True, False]
        assert switch.merged is not None
