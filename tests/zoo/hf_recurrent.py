"""Recurrent and state-space models of the transformers package, without the kernels that other packages add."""

from typing import Any

from .case import Inputs, generator
from .hf_case import VOCAB, hf_case, padded_text, random_ids


def _short_text() -> Inputs:
    return (), {"input_ids": random_ids(generator(), 2, 6)}  # a loop over positions


_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "use_cache": False}

CASES = {
    # Uses the weight of a Linear without calling the layer: that one stays dense.
    "hf_mamba": hf_case("MambaForCausalLM", "MambaConfig", padded_text, state_size=8, **_COMMON),
    # Time mixing in a loop. By default it divides weights in eval mode, which low-rank layers refuse.
    "hf_rwkv": hf_case("RwkvForCausalLM", "RwkvConfig", _short_text, rescale_every=0, **_COMMON),
}
