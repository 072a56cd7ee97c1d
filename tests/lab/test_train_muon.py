"""`--optimizer muon`: Muon for the matrices of the blocks, AdamW for the rest; resumed, with simulated workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_train import weights
from torch import nn

from pufferfish.lab.models import GPT, Llama
from pufferfish.lab.tasks import Recipe
from pufferfish.lab.tasks.text import Text
from pufferfish.lab.train import RunSettings, build_optimizer, train
from pufferfish.lab.train.build_optimizer import with_optimizer
from pufferfish.lab.train.training_method import training_method


def test_only_matrices_of_blocks_are_muons() -> None:
    recipe = Recipe(epochs=1, batch=1, lr=0.1, optimizer="muon", weight_decay=0.1)
    for model in (GPT(d=8, layers=2, heads=2, context=4), Llama(d=8, layers=2, heads=2, context=4)):
        muon, adamw = build_optimizer(model, recipe)
        names = {id(p): name for name, p in model.named_parameters()}
        mine = {names[id(p)] for p in muon.param_groups[0]["params"]}
        theirs = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
        assert mine == {
            name for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")
        }
        assert mine | theirs == set(names.values())
        assert not mine & theirs
    with pytest.raises(ValueError, match="optimizer muon: the model has no matrices in repeated blocks"):
        build_optimizer(nn.Linear(4, 4), recipe)
    assert with_optimizer(Recipe(epochs=1, batch=1, lr=0.1, optimizer="adamw"), "muon").lr == 0.1


@dataclass(frozen=True)
class Stopped(Text):
    """Sends SIGTERM at the `at`-th batch."""

    at: int = 0

    def batches(self, *given: Any, **more: Any) -> Iterator[Any]:
        for batch in super().batches(*given, **more):
            if "generator" in more:  # training
                _made.append(batch)
                if len(_made) == self.at:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield batch


_made: list[Any] = []


@pytest.mark.parametrize("simulate", [None, 2])
def test_resumed_runs_are_bit_identical(simulate: int | None, tmp_path: Path) -> None:
    """Stopped after the switch, in an epoch."""
    tiny.text(tmp_path)
    task = Stopped(d=64, layers=2, heads=2, context=8, dropout=0.1)
    recipe = replace(task.recipe("short"), epochs=3, batch=16, switch_at=1, optimizer="muon", lr=0.01)
    method = training_method("pufferfish+powersgd-2" if simulate else "pufferfish")
    given = RunSettings(method, recipe, tmp_path / "run", data=tmp_path, simulate=simulate, quiet=True)
    assert train(task, given) is not None
    steps = task.steps(task.load(tmp_path), recipe.batch)
    assert steps > 2
    _made.clear()
    stopping, given = (
        replace(task, at=(simulate or 1) * (steps + 2)),
        replace(given, folder=tmp_path / "stopped"),
    )
    assert train(stopping, given) is None
    assert train(stopping, given) is not None
    straight, resumed = weights(tmp_path / "run"), weights(tmp_path / "stopped")
    assert any(name.endswith("down.weight") and "attention" in name for name in straight)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(x, resumed[name]) for name, x in straight.items())
