"""`hf_case`: a case of the transformers package; configurations and inputs that several cases share."""
# mypy: no-warn-return-any

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Inputs, generator

VOCAB = 96

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    "use_cache": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_case(
    name: str,
    config: str,
    inputs: Callable[[], Inputs],
    output: str | Callable[[Any], Tensor] = "logits",
    linear: str | None = None,
    **options: Any,
) -> Case:
    """A case that builds transformers.<name>(transformers.<config>(**options)). Nothing is downloaded."""

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        return model(getattr(transformers, config)(**options))

    def pick(value: Any) -> Tensor:
        return value[output] if isinstance(output, str) else output(value)

    return Case(build=build, inputs=inputs, output=pick, needs="transformers", linear=linear)


def random_ids(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(4, VOCAB, shape, generator=g)


def padded_text() -> Inputs:
    mask = (torch.arange(10)[None] < torch.tensor([10, 6])[:, None]).long()
    return (), {"input_ids": random_ids(generator(), 2, 10), "attention_mask": mask}


def text() -> Inputs:
    return (), {"input_ids": random_ids(generator(), 2, 10)}
