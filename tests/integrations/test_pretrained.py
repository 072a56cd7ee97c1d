"""Folders of low-rank transformers models: plain `from_pretrained` refuses them, ours gives the same model back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import SHARD, SIZE, TOKENS, equal, llama, logits, low_rank_llama, names, weights
from peft import LoraConfig
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Trainer,
    TrainingArguments,
)

import pufferfish as pf
from processes import in_processes
from pufferfish.integrations.convert import convert
from pufferfish.integrations.transformers import from_pretrained

ONE_FILE = ["README.md", "config.json", "generation_config.json", "pufferfish.json", "pufferfish.safetensors"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", SHARD])
def test_the_same_model_comes_back(tmp_path: Path, shard: str, tied: bool) -> None:
    model = low_rank_llama(tie_word_embeddings=tied)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("pufferfish*.safetensors"))) == (1 if shard == "5GB" else 3)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(loaded.buffers(), model.buffers(), strict=True))
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.config.name_or_path == str(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert not loaded.training
    assert torch.equal(loaded.generate(TOKENS), model.generate(TOKENS))
    pf.load(other := llama(tie_word_embeddings=tied), tmp_path)
    assert torch.equal(logits(other), logits(model))
    loaded.save_pretrained(tmp_path, max_shard_size=shard)  # over the files that it was loaded from
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))


def test_dtype(tmp_path: Path) -> None:
    model = low_rank_llama().bfloat16()
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in from_pretrained(tmp_path).parameters()} == {torch.bfloat16}
    wide = from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu", attn_implementation="eager")
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert wide.config._attn_implementation == "eager"
    same = {name: value.float() for name, value in model.state_dict().items()}
    assert equal(dict(wide.state_dict()), same)


@pytest.mark.parametrize("shard", ["5GB", SHARD])
def test_plain_from_pretrained_raises(tmp_path: Path, shard: str) -> None:
    low_rank_llama().save_pretrained(tmp_path, max_shard_size=shard)
    for kind in (AutoModelForCausalLM, AutoModel, LlamaForCausalLM, LlamaModel):
        for options in ({}, {"use_safetensors": True}, {"use_safetensors": False}, {"variant": "pufferfish"}):
            with pytest.raises(OSError, match="no file named"):
                kind.from_pretrained(tmp_path, **options)


def run_card(folder: Path) -> Any:
    """The model that the code of the folder's README loads."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    user: dict[str, Any] = {}
    exec(code.replace("path/of/this/folder", str(folder)), user)
    return user["model"]


def test_the_folder_says_which_line_loads_it(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# My model\n\nFine-tuned.\n")
    model = low_rank_llama()
    for _ in range(2):
        model.save_pretrained(tmp_path)
    text = card.read_text()
    assert text.startswith("# My model\n\nFine-tuned.\n\n<!-- pufferfish")
    assert text.count("## Low-rank weights") == 1
    assert torch.equal(logits(run_card(tmp_path)), logits(model))


def test_saving_replaces_the_weights_of_the_folder(tmp_path: Path) -> None:
    """Dense weights from before the switch must not be left, nor shards of an earlier save."""
    dense, model = llama(), low_rank_llama()
    dense.save_pretrained(tmp_path)
    torch.save(dense.state_dict(), tmp_path / "pytorch_model.bin")
    dense.save_pretrained(tmp_path, max_shard_size=SHARD)
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    model.save_pretrained(tmp_path)
    assert names(tmp_path) == sorted([*ONE_FILE, "pytorch_model.bin.old"])
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    dense.save_pretrained(tmp_path)  # in the low-rank folder
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(dense))
    with pytest.raises(ValueError, match=r"dense weights \(model\.safetensors\) beside the low-rank ones"):
        from_pretrained(tmp_path)


def test_pf_save_into_a_folder_keeps_what_is_not_weights(tmp_path: Path) -> None:
    """Also a link stays a file of somebody else's: it is replaced, not written through."""
    model = low_rank_llama()
    (tmp_path / "blob").write_text("# My model\n")
    folder = tmp_path / "low"
    folder.mkdir()
    (folder / "README.md").symlink_to(tmp_path / "blob")
    model.save_pretrained(folder, max_shard_size=SHARD)
    assert (tmp_path / "blob").read_text() == "# My model\n"
    assert (folder / "README.md").read_text().startswith("# My model\n\n<!-- pufferfish")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("main")
    (folder / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    pf.save(model, folder)
    assert names(folder) == sorted([*ONE_FILE, ".git", "tokenizer.json"])
    assert (folder / ".git" / "HEAD").read_text() == "main"
    assert torch.equal(logits(from_pretrained(folder)), logits(model))
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(folder)
    pf.save(dense := llama(), folder)
    assert "pufferfish.safetensors" not in names(folder)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(dense))


def test_a_folder_whose_configuration_names_no_class(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None}))
    plan = convert(tmp_path / "dense", pf.plan(model, pf.Ratio(0.25, multiple=8)), tmp_path / "low")
    pf.factorize_(model, plan)
    loaded = run_card(tmp_path / "low")
    assert type(loaded) is LlamaForCausalLM
    torch.testing.assert_close(logits(loaded), logits(model))
    with pytest.raises(ValueError, match=r"names no class of transformers \(None\); pass model_class="):
        from_pretrained(tmp_path / "low")


def test_parts_of_a_model(tmp_path: Path) -> None:
    """The base model is factorized, the whole model is saved, and the other way round."""
    model = llama()
    pf.factorize_(model.model, pf.plan(model.model, pf.Ratio(0.25, multiple=8)))
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(from_pretrained(tmp_path / "whole")), logits(model))
    model.model.save_pretrained(tmp_path / "base")
    base = from_pretrained(tmp_path / "base")
    assert type(base) is LlamaModel
    assert torch.equal(base(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)


class OwnModel(LlamaForCausalLM):
    """Not in transformers."""


def test_a_class_of_the_users_own(tmp_path: Path) -> None:
    model = OwnModel(LlamaConfig(**SIZE)).eval()
    pf.factorize_(model, pf.plan(model, pf.Ratio(0.25, multiple=8)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"names no class of transformers .*OwnModel.*; pass model_class="):
        from_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, OwnModel)
    assert type(loaded) is OwnModel
    assert torch.equal(logits(loaded), logits(model))


def test_what_is_refused(tmp_path: Path) -> None:
    model = low_rank_llama()
    for name in ("push_to_hub", "variant", "distributed_checkpoint"):
        with pytest.raises(ValueError, match=f"{name} cannot be used for a low-rank model"):
            model.save_pretrained(tmp_path / "never", **{name: "x"})
    assert not (tmp_path / "never").exists()
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"dense: pufferfish\.json is missing"):
        from_pretrained(tmp_path / "dense")
    pf.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved: config\.json is missing; load .* by pufferfish\.load"):
        from_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "low")
    wider = LlamaConfig(**SIZE | {"hidden_size": 128})
    with pytest.raises(ValueError, match=r"low: .*the plan is for"):
        from_pretrained(tmp_path / "low", config=wider)


def test_adapters_are_saved_as_adapters(tmp_path: Path) -> None:
    model = low_rank_llama()
    model.add_adapter(LoraConfig(target_modules=["down", "up"], r=2))
    model.save_pretrained(tmp_path)
    assert "adapter_model.safetensors" in names(tmp_path)
    assert not list(tmp_path.glob("pufferfish*"))


def test_resizing_a_low_rank_head(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="LowRankLinear"):  # by transformers
        low_rank_llama().resize_token_embeddings(100)
    kept = llama()
    pf.factorize_(kept, pf.plan(kept, pf.Ratio(0.25, multiple=8), keep=["lm_head"]))
    kept.resize_token_embeddings(100)
    kept.save_pretrained(tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(kept))


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    data = [{"input_ids": (t := torch.arange(3 + i, 13 + i)), "labels": t} for i in range(16)]
    settings: dict[str, Any] = {
        "max_steps": 6, "save_steps": 2, "eval_steps": 2, "save_strategy": "steps", "eval_strategy": "steps",
        "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **settings | options)
    return Trainer(model, args, train_dataset=data, eval_dataset=data)


def test_the_trainer_reads_its_checkpoints_of_a_low_rank_model(tmp_path: Path) -> None:
    """Without our `train`: the model is low-rank from the start."""
    whole = trainer(low_rank_llama(), tmp_path / "whole")
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    assert {"pufferfish.safetensors", "optimizer.pt"} <= set(names(checkpoint))
    resumed = trainer(low_rank_llama(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert equal(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert torch.equal(logits(from_pretrained(tmp_path / "whole" / "checkpoint-6")), logits(whole.model))
    with pytest.raises(ValueError, match="checkpoint-4: saved after the switch"):
        trainer(llama(), tmp_path).train(resume_from_checkpoint=str(checkpoint))


def saves_shards(rank: int, size: int, folder: str) -> None:
    model = low_rank_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(folder, is_main_process=rank == 0, state_dict=state)


@pytest.mark.slow  # the workers import transformers
@pytest.mark.timeout(240)  # the hang guard
def test_fsdp2(tmp_path: Path) -> None:
    in_processes(saves_shards, 2, str(tmp_path / "saved"))
    assert names(tmp_path / "saved") == ONE_FILE
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(low_rank_llama()))
    assert weights(tmp_path / "saved").keys() == low_rank_llama().state_dict().keys()
