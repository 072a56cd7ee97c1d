"""Parameters of current language models at full size, dense and low-rank, against a closed form.

Models are built from transformers configurations on the meta device: no weights, no download. Routers, embeddings
and heads stay dense.

    python benchmarks/full_size.py [--rank 0.25] [--only Mixtral]
"""

import argparse
import math
from typing import Any

import torch

import pufferfish as pf

#: Sizes from the models' published configuration files: (family in transformers, settings).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "Qwen3-0.6B": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    }),
    "Mixtral-8x7B": ("Mixtral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    }),
    "Qwen3-30B-A3B": ("Qwen3Moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8,
    }),
    "DeepSeek-V3": ("DeepseekV3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512,
    }),
    "gpt-oss-20b": ("GptOss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    }),
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    """The model on the meta device."""
    import transformers

    family, settings = MODELS[name]
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**settings)
        )
    return model


def dense_and_low_rank(model: torch.nn.Module, ratio: float) -> tuple[pf.Plan, int]:
    """The plan, and the number of parameters of the low-rank model from shapes alone.

    A matrix m × n gets the rank r, its share of min(m, n) rounded up to a multiple of 16, and has r (m + n)
    weights if that is fewer. The gate and up projections of an expert are one matrix where that is smaller.
    """
    head = ["lm_head"] if model.lm_head.weight is not model.get_input_embeddings().weight else []
    plan = pf.plan(model, rank=ratio, keep=head)

    def low_rank(m: int, n: int) -> int:
        r = math.ceil(int(ratio * min(m, n)) / 16) * 16
        return min(m * n, r * (m + n))

    total = 0
    for name, p in model.named_parameters():
        if (
            p.dim() < 2
            or "embed" in name
            or "lm_head" in name
            or name.endswith(("gate.weight", "router.weight"))
        ):
            total += p.numel()
        elif p.dim() == 2 and name.endswith("_bias"):
            total += p.numel()  # of experts
        elif p.dim() == 2:
            total += low_rank(*p.shape)
        else:
            E, *sides = p.shape
            n = model.config.hidden_size
            m = math.prod(sides) // n
            if "gate_up" in name:
                total += E * min(low_rank(m, n), 2 * low_rank(m // 2, n))
            else:
                total += E * low_rank(m, n)
    return plan, total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=float, default=0.25, help="share of the full rank")
    parser.add_argument("--only", default="", help="part of a model's name")
    arguments = parser.parse_args()
    print(f"{'model':<15}{'parameters':>17}{'low-rank':>17}{'closed form':>17}{'smaller':>9}")
    for name in MODELS:
        if arguments.only in name:
            plan, expected = dense_and_low_rank(build(name), arguments.rank)
            before, after = plan.before.parameters, plan.after.parameters
            print(f"{name:<15}{before:>17,}{after:>17,}{expected:>17,}{before / after:>8.2f}×", flush=True)


if __name__ == "__main__":
    main()
