"""`pufferfish convert` and `merge` on Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pufferfish as pf
from pufferfish.cli import main
from pufferfish.integrations.transformers import from_pretrained

TOKENS = torch.arange(3, 13)[None]


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A model that is saved in the folder `dense` of the current one."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained("dense")
    return model


def test_a_folder_and_back(dense: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "dense", "--rank", "0.25", "--keep", "lm_head", "--out", "low"]) == 0
    plan = pf.plan(dense, 0.25, keep=["lm_head"])
    assert f"{plan.before.parameters:,} → {plan.after.parameters:,} parameters" in capsys.readouterr().out
    pf.factorize_(dense, plan)
    with torch.no_grad():
        torch.testing.assert_close(from_pretrained("low")(TOKENS).logits, dense(TOKENS).logits)
        assert main(["merge", "low", "--out", "again"]) == 0
        again = AutoModelForCausalLM.from_pretrained("again")
        torch.testing.assert_close(again(TOKENS).logits, dense(TOKENS).logits)


@pytest.mark.parametrize("rank", ["0.25", "energy:0.5"])
def test_the_plan_of_a_folder(dense: LlamaForCausalLM, rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is that of the model, with ranks of the weights in the folder, and `convert` takes it."""
    expected = pf.resolve(pf.plan(dense, pf.Energy(0.5) if "energy" in rank else 0.25), dense)
    command = ["plan", "dense", "--rank", rank, "--out", "plan.json"]
    assert main(command) == 0
    assert pf.Plan.load("plan.json").ranks == expected.ranks
    assert main(["convert", "dense", "--plan", "plan.json", "--out", "low"]) == 0
    pf.factorize_(dense, expected)
    with torch.no_grad():
        torch.testing.assert_close(from_pretrained("low")(TOKENS).logits, dense(TOKENS).logits)
    for path in Path("dense").glob("*.safetensors"):
        path.unlink()
    config = json.loads(Path("dense/config.json").read_text())
    Path("dense/config.json").write_text(json.dumps(config | {"architectures": None}))
    capsys.readouterr()
    assert main(["plan", "dense"]) == 0  # a configuration is enough
    assert "this is LlamaModel, without a head" in capsys.readouterr().out
    assert main(["plan", "dense", "--measure"]) == 2
    assert "dense: --measure needs a batch" in capsys.readouterr().err
    Path("dense/config.json").write_text("{}")
    assert main(["plan", "dense"]) == 2
    assert "dense: its config.json does not name a model of transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense/model.safetensors", "--rank", "8"], "--rank needs a Hugging Face folder"),
        (["own", "--rank", "8"], "own: its config.json does not name a transformers class; pass --plan"),
        (["dense", "--rank", "8", "--keep", "x*"], "x*"),
        (["dense", "--plan", "p.json", "--keep", "x"], "--keep works with --rank only"),
        (["nowhere", "--rank", "8"], "nowhere: no such file or folder"),
    ],
)
@pytest.mark.usefixtures("dense")
def test_invalid_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own").mkdir()
    Path("own/config.json").write_text('{"architectures": ["Mine"]}')
    assert main(["convert", *arguments, "--out", "low"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("low").exists()
