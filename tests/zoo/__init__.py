"""Small, randomly initialized versions of real architectures, to try pufferfish on."""

from . import attention, dense_prediction, hf, image, mlp, recurrent, structure
from .case import Case

ZOO: dict[str, Case] = {
    **image.CASES,
    **dense_prediction.CASES,
    **attention.CASES,
    **recurrent.CASES,
    **mlp.CASES,
    **structure.CASES,
    **hf.CASES,
}

__all__ = ["ZOO", "Case"]
