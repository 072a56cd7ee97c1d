"""`all_finite`: whether tensors contain neither inf nor NaN."""

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of the tensors are finite; synchronizes with their device once.

    >>> all_finite([torch.ones(2), torch.tensor(float("nan"))])
    False
    """
    return bool(torch.stack([x.detach().isfinite().all() for x in tensors]).all())
