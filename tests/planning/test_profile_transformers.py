"""Models of the transformers package, from small configurations: plans after a run, MACs, memory."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf

transformers = pytest.importorskip("transformers")
Inputs = dict[str, Tensor]

DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "use_cache": False,
}


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(0))


def llama() -> tuple[nn.Module, Any]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    return model, {"input_ids": tokens(2, 10), "output_hidden_states": True}


def llava() -> tuple[nn.Module, Inputs]:
    """The language model reads hidden states that the vision model captures; image tokens are counted."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    text = transformers.LlamaConfig(**DECODER)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=95, image_seq_length=16
    )
    ids = tokens(1, 24)
    ids[:, 2:18] = 95
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }
    return transformers.LlavaForConditionalGeneration(config), inputs


@pytest.fixture
def no_real_copy() -> Iterator[None]:
    """Fail where a plan announces that it copies the model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the example does not run on fake tensors")
        yield


@pytest.mark.filterwarnings("ignore:the example does not run on fake tensors")  # llava
@pytest.mark.parametrize("build", [llama, llava])
def test_a_plan_after_a_run_equals_one_before(build: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    model, inputs = build()
    before = pf.plan(model, example=inputs)
    assert before.ranks
    model(**inputs)
    assert any(hasattr(module, "_output_capturing_hooks_installed") for module in model.modules())
    assert pf.plan(model, example=inputs) == before
    pf.factorize_(model, before)
    assert pf.plan(model, example=inputs).before.forward_macs == before.after.forward_macs
    assert pf.lowrank.plan_of(model).ranks == before.ranks
    assert model.training is True


# MACs of models whose code reads weights: T5 the dtype, Mamba more.


def t5() -> tuple[nn.Module, Inputs]:
    config = transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": tokens(2, 10), "decoder_input_ids": tokens(2, 7)}
    return transformers.T5ForConditionalGeneration(config), inputs


def mamba() -> tuple[nn.Module, Inputs]:
    config = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, use_cache=False)
    return transformers.MambaForCausalLM(config), {"input_ids": tokens(2, 10)}


@pytest.mark.usefixtures("no_real_copy")
@pytest.mark.parametrize("build", [t5, mamba])
def test_the_low_rank_model_has_the_planned_macs(build: Any) -> None:
    model, inputs = build()
    plan = pf.plan(model, example=inputs)
    pf.factorize_(model, plan)
    actual = pf.plan(model, example=inputs).before
    assert plan.after.forward_macs < 0.6 * plan.before.forward_macs
    assert actual.forward_macs == plan.after.forward_macs
    assert actual.backward_macs == plan.after.backward_macs


@pytest.mark.filterwarnings("ignore:the example does not run on fake tensors")
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_mixture_of_experts(implementation: str) -> None:
    """The closed form: each token visits `k` experts of three products."""
    config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **DECODER)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    batch, time, d, k, experts = 2, 10, 64, 2, 4
    attention = batch * time * (2 * d * 64 + 2 * d * 32) + 2 * batch * time * time * 64
    mlp = batch * time * (d * experts + k * 3 * d * 128)
    before = pf.plan(model, example={"input_ids": tokens(batch, time)}).before
    assert before.forward_macs == 2 * (attention + mlp) + batch * time * d * 96
    assert before.backward_macs == 2 * before.forward_macs


# Attention masks.


@pytest.mark.usefixtures("no_real_copy")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("padding", [0, 4])
def test_a_padded_batch_needs_no_copy(padding: int, device: str) -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, **DECODER)).to(device)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 10 - padding :] = 0
    inputs = {"input_ids": tokens(2, 10), "attention_mask": mask}
    plan = pf.plan(model, example=inputs)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert plan.before.forward_macs == 20 * weights + 2 * 2 * (2 * 10 * 10 * 64)
