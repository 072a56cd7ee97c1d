"""Small, randomly initialized versions of real architectures, to try pufferfish on."""

from . import (
    attention,
    dense_prediction,
    hf,
    hf_experts,
    hf_recurrent,
    hf_vision,
    image,
    recurrent,
    structure,
)
from .case import Case

ZOO: dict[str, Case] = {
    **image.CASES,
    **dense_prediction.CASES,
    **attention.CASES,
    **recurrent.CASES,
    **structure.CASES,
    **hf.CASES,
    **hf_vision.CASES,
    **hf_recurrent.CASES,
    **hf_experts.CASES,
}

__all__ = ["ZOO", "Case"]
