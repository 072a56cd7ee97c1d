"""Vision models of the transformers package whose parts return hidden states to each other."""

from typing import Any

import torch

from .case import Inputs, all_tensors, generator
from .hf_case import DECODER, hf_case, random_ids

_IMAGE_TOKEN = 3


def _image_in_text() -> Inputs:
    g = generator()
    ids, mask = random_ids(g, 2, 10), torch.ones(2, 10, dtype=torch.long)
    ids[:, 1:5] = _IMAGE_TOKEN  # one for each patch
    mask[1, 8:] = 0
    pixels = torch.randn(2, 3, 16, 16, generator=g)
    return (), {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def _padded_image() -> Inputs:
    mask = torch.ones(2, 32, 32, dtype=torch.long)
    mask[1, :, 20:] = 0
    return (), {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator()), "pixel_mask": mask}


_LLAVA: dict[str, Any] = {
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "initializer_range": 0.1,
    },
    "text_config": {"model_type": "llama", **DECODER},
    "image_token_index": _IMAGE_TOKEN,
    "vision_feature_layer": -1,
}
_DETR: dict[str, Any] = {
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_queries": 5,
    "num_labels": 7,
    "dropout": 0.0,
    "init_std": 0.1,
}

CASES = {
    # Images and text: image features replace the tokens that mark them, at places known from the values of the ids.
    "hf_llava": hf_case("LlavaForConditionalGeneration", "LlavaConfig", _image_in_text, **_LLAVA),
    # Convolutional backbone, partly frozen; encoder-decoder with queries; heads for classes and boxes.
    "hf_detr": hf_case("DetrForObjectDetection", "DetrConfig", _padded_image, all_tensors, **_DETR),
}
