"""Models of the transformers package, from small configurations (nothing is downloaded)."""
# mypy: no-warn-return-any

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Inputs, generator

VOCAB = 96


def _case(
    name: str, config: str, inputs: Callable[[], Inputs], output: str = "logits", **options: Any
) -> Case:
    """A case that builds transformers.<name>(transformers.<config>(**options))."""

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        return model(getattr(transformers, config)(**options))

    def pick(value: Any) -> Tensor:
        return value[output]

    return Case(build=build, inputs=inputs, output=pick, needs="transformers")


def _ids(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=g)


def _padded_text() -> Inputs:
    mask = (torch.arange(10)[None] < torch.tensor([10, 6])[:, None]).long()
    return (), {"input_ids": _ids(generator(), 2, 10), "attention_mask": mask}


def _text() -> Inputs:
    return (), {"input_ids": _ids(generator(), 2, 10)}


def _two_texts() -> Inputs:
    g = generator()
    return (), {"input_ids": _ids(g, 2, 10), "decoder_input_ids": _ids(g, 2, 7)}


def _image() -> Inputs:
    return (), {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator())}


def _spectrogram() -> Inputs:
    g = generator()
    return (), {"input_features": torch.randn(2, 64, 32, generator=g), "decoder_input_ids": _ids(g, 2, 6)}


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
_DECODER: dict[str, Any] = {
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
_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "n_layers": 2,
    "n_heads": 4,
    "dim": 64,
    "hidden_dim": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "qa_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "initializer_range": 0.1,
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
    "hf_bert": _case("BertForMaskedLM", "BertConfig", _padded_text, **_BERT),
    # transformers' Conv1D (transposed weight), fused query-key-value, tied output layer.
    "hf_gpt2": _case("GPT2LMHeadModel", "GPT2Config", _text, **_GPT2),
    # Encoder and decoder sharing one embedding, relative-position bias, gated feed-forward without bias.
    "hf_t5": _case("T5ForConditionalGeneration", "T5Config", _two_texts, **_T5),
    # Rotary positions, grouped-query attention (k and v narrower), SwiGLU, untied output layer.
    "hf_llama": _case("LlamaForCausalLM", "LlamaConfig", _text, **_DECODER),
    # As Llama, but with bias on q, k, v only, a padding mask and a tied output layer.
    "hf_qwen2": _case("Qwen2ForCausalLM", "Qwen2Config", _padded_text, tie_word_embeddings=True, **_DECODER),
    # Attention over a sliding window, head_dim that is not hidden_size / heads.
    "hf_mistral": _case(
        "MistralForCausalLM", "MistralConfig", _text, sliding_window=4, head_dim=32, **_DECODER
    ),
    # Sequence classification from the first token; q_lin, k_lin, v_lin, out_lin names.
    "hf_distilbert": _case(
        "DistilBertForSequenceClassification", "DistilBertConfig", _padded_text, **_DISTILBERT
    ),
    # One layer used at every depth, and an embedding that is already factorized.
    "hf_albert": _case(
        "AlbertForMaskedLM",
        "AlbertConfig",
        _padded_text,
        **_BERT | {"embedding_size": 32, "num_hidden_layers": 3},
    ),
    # Patch convolution and raw token and position Parameters inside an embeddings module.
    "hf_vit": _case(
        "ViTForImageClassification", "ViTConfig", _image, **_BERT | {"image_size": 32, "patch_size": 8}
    ),
    # Conv1d front end, encoder-decoder, k_proj without bias, frozen sinusoidal positions.
    "hf_whisper": _case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _spectrogram,
        **_ENCODER_DECODER | {"num_mel_bins": 64, "max_source_positions": 16, "max_target_positions": 16},
    ),
    # Strided Conv1d feature encoder on raw audio, grouped and weight-normalized positional convolution.
    "hf_wav2vec2": _case("Wav2Vec2ForCTC", "Wav2Vec2Config", _waveform, **_WAV2VEC2),
    # Top-2 mixture of experts whose experts are stacked 3-D Parameters, not modules.
    "hf_mixtral": _case(
        "MixtralForCausalLM", "MixtralConfig", _text, num_local_experts=4, num_experts_per_tok=2, **_DECODER
    ),
    # Post-norm encoder-decoder with learned positions, embedding shared by encoder, decoder and output.
    "hf_bart": _case(
        "BartForConditionalGeneration",
        "BartConfig",
        _two_texts,
        **_ENCODER_DECODER | {"max_position_embeddings": 32, "forced_eos_token_id": None},
    ),
}
