"""Encoders, decoders and speech models of the transformers package, from small configurations."""

from typing import Any

import torch

from .case import Inputs, generator
from .hf_case import DECODER, VOCAB, hf_case, padded_text, random_ids, text


def _two_texts() -> Inputs:
    g = generator()
    return (), {"input_ids": random_ids(g, 2, 10), "decoder_input_ids": random_ids(g, 2, 7)}


def _text_with_states() -> Inputs:
    args, kwargs = padded_text()
    return args, kwargs | {"output_hidden_states": True}


def _spectrogram() -> Inputs:
    g = generator()
    features = torch.randn(2, 64, 32, generator=g)
    return (), {"input_features": features, "decoder_input_ids": random_ids(g, 2, 6)}


def _waveform() -> Inputs:
    return (), {"input_values": torch.randn(2, 800, generator=generator())}


_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 32,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.1,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "dropout": 0.0,
    "init_std": 0.1,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_WAV2VEC2: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "conv_dim": (64, 64, 64),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "initializer_range": 0.1,
}

CASES = {
    # Post-norm encoder with padding mask; the output layer is tied to the embedding and its bias held twice.
    "hf_bert": hf_case("BertForMaskedLM", "BertConfig", padded_text, **_BERT),
    # transformers' Conv1D (transposed weight), fused query-key-value, tied output layer.
    "hf_gpt2": hf_case("GPT2LMHeadModel", "GPT2Config", text, **_GPT2),
    # Encoder and decoder sharing one embedding, relative-position bias, gated feed-forward without bias.
    "hf_t5": hf_case("T5ForConditionalGeneration", "T5Config", _two_texts, **_T5),
    # The same with hidden states as outputs: transformers installs hooks in the model and a flag that says so.
    "hf_llama_states": hf_case("LlamaForCausalLM", "LlamaConfig", _text_with_states, **DECODER),
    # Linear layers of its own type, one for query, key and value; attention and feed-forward in parallel.
    "hf_falcon": hf_case(
        "FalconForCausalLM",
        "FalconConfig",
        padded_text,
        linear="transformers.models.falcon.modeling_falcon.FalconLinear",
        **{k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "intermediate_size")},
    ),
    # One layer used at every depth, and an embedding that is already factorized.
    "hf_albert": hf_case(
        "AlbertForMaskedLM",
        "AlbertConfig",
        padded_text,
        **_BERT | {"embedding_size": 32, "num_hidden_layers": 3},
    ),
    # Conv1d front end, encoder-decoder, k_proj without bias, frozen sinusoidal positions.
    "hf_whisper": hf_case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _spectrogram,
        **_ENCODER_DECODER | {"num_mel_bins": 64, "max_source_positions": 16, "max_target_positions": 16},
    ),
    # Strided Conv1d feature encoder on raw audio, grouped and weight-normalized positional convolution.
    "hf_wav2vec2": hf_case("Wav2Vec2ForCTC", "Wav2Vec2Config", _waveform, **_WAV2VEC2),
}
