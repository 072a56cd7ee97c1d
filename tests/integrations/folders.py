"""Small transformers models and their folders, for the tests of saving, loading and converting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pufferfish as pf

SIZE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = torch.arange(3, 13)[None]
#: More than one shard for the models here.
SHARD = "60KB"


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE | options)).eval()


def low_rank_llama(**options: Any) -> LlamaForCausalLM:
    model = llama(**options)
    pf.factorize_(model, pf.plan(model, pf.Ratio(0.25, multiple=8)))
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(TOKENS).logits
    return output


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or several."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
