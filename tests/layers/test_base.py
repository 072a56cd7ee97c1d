"""Copies without tensors: hooks are left out, and flags with "hooks" in their names stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pufferfish as pf
from pufferfish.layers.base import HOOKS


class Flagged(nn.Module):
    """Has attributes that look like hooks by their names, as some libraries set them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.hooks_installed = self._output_hooks_installed = True
        self._my_hooks = None
        self.own_hooks = {"a": [1, 2]}
        self.layer._seen_hooks_ = True


def test_flags_named_like_hooks_stay() -> None:
    model = Flagged()
    for name in HOOKS:
        getattr(model.layer, name)[7] = print
    copied: Any = pf.layers.meta_copy(model)
    assert (copied.hooks_installed, copied._output_hooks_installed, copied._my_hooks) == (True, True, None)
    assert copied.own_hooks == {"a": [1, 2]}
    assert copied.own_hooks is not model.own_hooks
    assert copied.training is copied.layer.training is copied.layer._seen_hooks_ is True
    assert not any(getattr(module, name) for module in copied.modules() for name in HOOKS)
    assert all(getattr(model.layer, name) for name in HOOKS)


def test_a_flag_does_not_keep_a_layer_dense() -> None:
    model = Flagged()
    pf.factorize_(model, pf.plan(model, 8))
    assert isinstance(model.layer, pf.layers.LowRankLinear)
    assert pf.plan_of(model).ranks == {"layer": {"": 8}}


def test_a_transformers_model_that_has_captured_its_outputs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )

    def build() -> Any:
        return transformers.LlamaForCausalLM(config)

    model, tokens = build(), torch.arange(10)[None]
    assert len(model(tokens, output_hidden_states=True).hidden_states) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = pf.factorize_(model, pf.plan(model, 8), optimizer)
    assert len(model(tokens, output_hidden_states=True).hidden_states) == 3
    assert pf.plan_of(model).ranks == plan.ranks

    pf.save(model, tmp_path / "saved")
    fresh = build()
    pf.load(fresh, tmp_path / "saved")
    assert torch.equal(fresh(tokens).logits, model(tokens).logits)

    with pf.Checkpoint(tmp_path / "run", model, optimizer) as checkpoint:
        checkpoint.save(step=1)
    again = build()
    assert pf.Checkpoint.plan_in(tmp_path / "run").ranks == plan.ranks
    pf.reshape_(again, plan)
    with pf.Checkpoint(tmp_path / "run", again, torch.optim.SGD(again.parameters(), lr=0.1)) as checkpoint:
        assert checkpoint.resume() is not None
    assert torch.equal(again(tokens).logits, model(tokens).logits)

    pf.merge_(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
