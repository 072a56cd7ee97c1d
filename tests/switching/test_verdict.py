"""The verdict at the end of a switch's report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.switching.moments import Position
from pufferfish.switching.report import Report


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0))
    switch.step(nn.Sequential(nn.Linear(64, 64)), None, epoch=0)
    assert switch.report is not None
    return switch.report


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2.0, 2.0, "fine. The held-out loss does not rise."),
        (2.0, 1.0, "fine. The held-out loss does not rise."),
        (2.0, 2.19, "fine. The held-out loss rises by 9%."),
        (2.0, 2.3, "usual. The held-out loss rises by 15%; look again after two epochs"),
        (2.0, 4.0, "usual. The held-out loss rises by 100%;"),
        (2.0, 4.1, "large. The held-out loss rises from 2 to 4.1."),
        (-2.0, -1.9, "fine. The held-out loss rises by 5%."),
        (-2.0, 1.0, "large. The held-out loss rises from -2 to 1."),
        (0.0, 0.0, "fine."),
        (0.0, 0.1, "large. The held-out loss rises from 0 to 0.1."),
        (2.0, math.nan, "failed. The held-out loss is nan after the switch; raise the rank"),
        (2.0, math.inf, "failed. The held-out loss is inf"),
    ],
)
def test_the_loss_decides(report: Report, before: float, after: float, words: str) -> None:
    told = replace(report, loss=(before, after))
    assert told.verdict.startswith(words)
    assert str(told).splitlines()[-1] == f"verdict: {told.verdict}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (0.1, "fine. 99% of the energy is kept on average."),
        (0.6, "usual. 64% of the energy is kept on average; pass evaluate="),
        (0.9, "low. 19% of the energy is kept on average. Pass evaluate="),
    ],
)
def test_energy_without_a_loss(report: Report, error: float, words: str) -> None:
    plan = report.plan.replace(replace(e, error=error) for e in report.plan)
    assert replace(report, plan=plan).verdict.startswith(words)


def test_nothing_to_judge(report: Report) -> None:
    assert replace(report, merged=Position(epoch=3)).verdict == ""
    plan = report.plan.replace(replace(e, error=None) for e in report.plan)
    assert "verdict" not in str(replace(report, plan=plan))
