"""Hugging Face folders converted on disk, compared with the same model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import SHARD, SIZE, TOKENS, equal, llama, logits, names, weights

pytest.importorskip("transformers", minversion="5.22", reason="names of weights differ in older transformers")
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import pufferfish as pf
from pufferfish.integrations.convert import convert, merge
from pufferfish.integrations.transformers import from_pretrained

VISION = {
    k: SIZE[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
#: Tied weights; a transposed weight; a file for each expert and one tensor in the model; interleaved experts with biases;
#: names of submodels that have changed.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZE, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2, head_dim=16)),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION, image_size=16, patch_size=8),
            text_config=LlamaConfig(**SIZE),
            image_token_index=95,
        )
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def output(model: PreTrainedModel) -> Any:
    inputs = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(TOKENS, **inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_folders_become_what_the_model_becomes(tmp_path: Path, name: str) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "dense", max_shard_size=SHARD)
    plan = convert(
        tmp_path / "dense", pf.plan(model, pf.Ratio(0.25, multiple=8)), tmp_path / "low", max_shard=60_000
    )
    assert len(list((tmp_path / "low").glob("pufferfish-*-of-*.safetensors"))) > 1
    pf.factorize_(model, plan)
    loaded = from_pretrained(tmp_path / "low")
    state = dict(model.state_dict())
    assert equal(dict(loaded.state_dict()), state)
    torch.testing.assert_close(output(loaded), output(model))
    merge(tmp_path / "low", tmp_path / "again", max_shard=60_000)
    pf.merge_(model)
    model.save_pretrained(tmp_path / "expected", max_shard_size=SHARD)
    assert equal(weights(tmp_path / "again"), weights(tmp_path / "expected"))
    plain = type(model).from_pretrained(tmp_path / "again")
    torch.testing.assert_close(output(plain), output(model))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_trainers_optimizer_goes_along(tmp_path: Path, name: str) -> None:
    data = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model := build(name), args, train_dataset=data)
    trainer.train()
    plan = convert(tmp_path / "checkpoint-2", pf.plan(model, pf.Ratio(0.25, multiple=8)), tmp_path / "low")
    pf.factorize_(model, plan, trainer.optimizer)
    check_state(trainer.optimizer, tmp_path / "low")
    merge(tmp_path / "low", tmp_path / "again")
    pf.merge_(model, trainer.optimizer)
    check_state(trainer.optimizer, tmp_path / "again")
    assert (tmp_path / "again" / "scheduler.pt").is_file()


def check_state(optimizer: Any, folder: Path) -> None:
    expected, saved = optimizer.state_dict(), torch.load(folder / "optimizer.pt", weights_only=True)
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(saved["state"][number][name], value, rtol=1e-4, atol=1e-7)


def test_files_of_the_base_model_lack_its_prefix(tmp_path: Path) -> None:
    model = build("gpt2")
    model.transformer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "wte.weight" in weights(tmp_path)
    plan = convert(tmp_path, pf.plan(model, pf.Ratio(0.25, multiple=8)), tmp_path / "low")
    pf.factorize_(model, plan)
    torch.testing.assert_close(output(from_pretrained(tmp_path / "low")), output(model))


def test_everything_else_in_the_folder_goes_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model = llama()
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path / "dense", max_shard_size=SHARD)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template={"default": "a", "tool": "b"})
    tokenizer.save_pretrained(tmp_path / "dense")
    assert (tmp_path / "dense" / "additional_chat_templates").is_dir()
    (tmp_path / "dense" / "README.md").write_text("# Mine\n")
    others = set(names(tmp_path / "dense")) - {p.name for p in (tmp_path / "dense").glob("model*")}
    for stale in ("pytorch_model.bin", "tf_model.h5", "model.gguf", "consolidated.00.pth"):
        (tmp_path / "dense" / stale).write_text("another format")
    (tmp_path / "dense" / "checkpoint-4").mkdir()
    convert(tmp_path / "dense", pf.plan(model, pf.Ratio(0.25, multiple=8)), tmp_path / "low")
    assert set(names(tmp_path / "low")) == others | {"pufferfish.json", "pufferfish.safetensors"}
    assert "from_pretrained" in (tmp_path / "low" / "README.md").read_text()
    merge(tmp_path / "low", tmp_path / "again")
    assert set(names(tmp_path / "again")) == others | {"model.safetensors"}
    for name in others:
        if (tmp_path / "dense" / name).is_file():
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "dense" / name).read_bytes(), name
    loaded = from_pretrained(tmp_path / "low")
    assert loaded.generation_config.max_new_tokens == 5
    assert type(model).from_pretrained(tmp_path / "again").generation_config.max_new_tokens == 5


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    model = llama()
    plan = pf.plan(model, pf.Ratio(0.25, multiple=8))
    model.save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", plan, tmp_path / "low")
    with pytest.raises(ValueError, match="low: it is low-rank already"):
        convert(tmp_path / "low", plan, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"dense: pufferfish\.json is missing; this is not a low-rank folder"
    ):
        merge(tmp_path / "dense", tmp_path / "out")
    config = tmp_path / "dense" / "config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps(text | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="dense: its weights are quantized"):
        convert(tmp_path / "dense", plan, tmp_path / "out")
    config.write_text(json.dumps(text | {"architectures": ["OwnModel"]}))  # the names in the file are used
    assert convert(tmp_path / "dense", plan, tmp_path / "own").hash == plan.hash
    assert torch.equal(
        logits(from_pretrained(tmp_path / "own", type(model))), logits(from_pretrained(tmp_path / "low"))
    )
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        convert(tmp_path / "dense", plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
