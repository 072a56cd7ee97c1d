"""Mixtures of experts of the transformers package: experts are stacked 3-D Parameters, not modules."""

from typing import Any

from .hf_case import DECODER, hf_case, padded_text, text

_DEEPSEEK: dict[str, Any] = DECODER | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GPT_OSS: dict[str, Any] = DECODER | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_NEMOTRON: dict[str, Any] = DECODER | {
    "head_dim": 16,
    "layers_block_type": ["moe", "attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_LLAMA4: dict[str, Any] = DECODER | {
    "head_dim": 16,
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
}

CASES = {
    # Two of four experts for each token; gate and up of each expert are factorized as one matrix.
    "hf_mixtral": hf_case(
        "MixtralForCausalLM", "MixtralConfig", text, num_local_experts=4, num_experts_per_tok=2, **DECODER
    ),
    # Groups of experts and a shared one, a dense first layer, attention whose projections are low-rank by design.
    "hf_deepseek_v3": hf_case("DeepseekV3ForCausalLM", "DeepseekV3Config", padded_text, **_DEEPSEEK),
    # Experts stored transposed, with gate and up interleaved and with biases.
    "hf_gpt_oss": hf_case("GptOssForCausalLM", "GptOssConfig", padded_text, **_GPT_OSS),
    # Experts without a gate.
    "hf_nemotron_h": hf_case("NemotronHForCausalLM", "NemotronHConfig", padded_text, **_NEMOTRON),
    # Every expert computes every token; rows arrive sorted by expert.
    "hf_llama4": hf_case("Llama4ForCausalLM", "Llama4TextConfig", text, **_LLAMA4),
}
