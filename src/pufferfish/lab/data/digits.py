"""`digits`: 1,797 handwritten digits of 8×8 pixels, included in the package.

Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 (CC BY 4.0).
"""

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


def digits(test: bool = False) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n,). The test split is every fifth digit.

    >>> [tuple(x.shape) for x in (*digits(), *digits(test=True))]
    [(1438, 1, 8, 8), (1438,), (359, 1, 8, 8), (359,)]
    """
    text = gzip.decompress(files(__package__).joinpath("digits.csv.gz").read_bytes()).decode()
    rows = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", dtype=np.int64))
    in_test = torch.arange(len(rows)) % 5 == 4
    rows = rows[in_test if test else ~in_test]
    return rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64]
