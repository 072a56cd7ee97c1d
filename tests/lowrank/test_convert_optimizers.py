"""Saved states of Muon and AdamW, converted together with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from optimizers import Net, muon_and_adamw, plan, train
from pufferfish.integrations.convert import convert, merge


def trained() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Net()
    optimizers = muon_and_adamw(model)
    train(model, optimizers, range(2))
    return model, optimizers


def save(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    states = {type(o).__name__: o.state_dict() for o in optimizers}
    torch.save({"model": model.state_dict(), **states}, path)


def check_converted(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """The file has the states of the model that was changed in memory."""
    data = torch.load(path, weights_only=True)
    assert data["model"].keys() == model.state_dict().keys()
    for optimizer in optimizers:
        check_state(data[type(optimizer).__name__], optimizer)


def check_state(mine: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    expected = optimizer.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    assert mine["state"].keys() == expected["state"].keys()
    for number, state in mine["state"].items():
        torch.testing.assert_close(state, expected["state"][number], rtol=1e-3, atol=1e-6)


def test_states_of_both_optimizers_are_converted_there_and_back(tmp_path: Path) -> None:
    model, optimizers = trained()
    chosen = pf.plan(model, 4, keep=["head", "gru"])
    save(tmp_path / "dense.pt", model, optimizers)
    convert(tmp_path / "dense.pt", chosen, tmp_path / "low.pt")
    pf.factorize_(model, chosen, optimizers)
    check_converted(tmp_path / "low.pt", model, optimizers)
    merge(tmp_path / "low.pt", tmp_path / "back.pt")
    pf.merge_(model, optimizers)
    check_converted(tmp_path / "back.pt", model, optimizers)


def test_a_weight_whose_factors_are_in_two_optimizers_goes_to_the_first(tmp_path: Path) -> None:
    model, optimizers = trained()
    chosen = pf.factorize_(model, plan(model), optimizers)
    save(tmp_path / "low.pt", model, optimizers)
    merge(tmp_path / "low.pt", tmp_path / "back.pt", chosen)
    pf.merge_(model, optimizers)
    check_converted(tmp_path / "back.pt", model, optimizers)


def test_two_states_of_one_optimizer_are_converted_each(tmp_path: Path) -> None:
    model, optimizers = trained()
    chosen = pf.plan(model, 4, keep=["head", "gru"])
    adamw = optimizers[1].state_dict()
    torch.save({"model": model.state_dict(), "last": adamw, "best": adamw}, tmp_path / "dense.pt")
    convert(tmp_path / "dense.pt", chosen, tmp_path / "low.pt")
    pf.factorize_(model, chosen, optimizers)
    data = torch.load(tmp_path / "low.pt", weights_only=True)
    check_state(data["last"], optimizers[1])
    check_state(data["best"], optimizers[1])


def test_factors_that_muon_does_not_take_go_to_the_other_optimizer(tmp_path: Path) -> None:
    model, optimizers = trained()
    save(tmp_path / "dense.pt", model, optimizers)
    convert(tmp_path / "dense.pt", plan(model), tmp_path / "low.pt")
    pf.factorize_(model, plan(model), optimizers)
    check_converted(tmp_path / "low.pt", model, optimizers)


def test_without_another_optimizer_they_are_refused(tmp_path: Path) -> None:
    model, optimizers = trained()
    save(tmp_path / "dense.pt", model, optimizers[:1])
    with pytest.raises(ValueError, match=r"gru\.weight_ih_l0\.up\.weight: .*Muon takes matrices"):
        convert(tmp_path / "dense.pt", plan(model), tmp_path / "low.pt")
    assert not (tmp_path / "low.pt").exists()
