"""Slow references of the methods with few bits: one block or chunk after the other, in plain numpy."""

from __future__ import annotations

import math

import numpy as np
import torch

Array = np.ndarray


def bfloat16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32).bfloat16())


def int4(block: Array) -> Array:
    """The nearest of −7 to 7 sevenths of the largest magnitude."""
    step = np.abs(block).max() / 7
    return np.array([step * min(range(-7, 8), key=lambda level: abs(x - level * step)) for x in block])


def int2(block: Array) -> Array:
    """Signs, and the mean magnitude of those below or not below the root mean square."""
    rms = math.sqrt(sum(x * x for x in block) / len(block))
    small, large = [abs(x) for x in block if abs(x) < rms], [abs(x) for x in block if abs(x) >= rms]
    low, high = (bfloat16(sum(group) / max(len(group), 1)) for group in (small, large))
    return np.array([math.copysign(high if abs(x) >= rms else low, x if x else 1.0) for x in block])


def sparse_chunk(chunk: Array, k: int) -> Array:
    """The k largest of a chunk by sign and one of two magnitudes, zeros elsewhere."""
    chosen = sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))[:k]
    sizes = [abs(chunk[i]) for i in chosen]
    sent = np.zeros(len(chunk))
    if not sum(sizes):
        return sent
    split = sum(x * x for x in sizes) / sum(sizes)
    small, large = [x for x in sizes if x < split], [x for x in sizes if x >= split]
    high = bfloat16(sum(large) / len(large))
    low = high * round(255 * sum(small) / max(len(small), 1) / high) / 255
    for i in chosen:
        sent[i] = math.copysign(high if abs(chunk[i]) >= split else low, chunk[i])
    return sent


def sparse_loco(x: Array, side: int = 64, k: int = 64) -> Array:
    """What SparseLoCo sends of a matrix that `side` divides, or of a vector, cut into runs of side² elements."""
    sent = np.zeros(x.shape)
    if x.ndim == 1:
        for a in range(0, len(x), side * side):
            run = x[a : a + side * side]
            sent[a : a + side * side] = sparse_chunk(run, max(1, round(k * len(run) / side**2)))
        return sent
    for a in range(0, x.shape[0], side):
        for b in range(0, x.shape[1], side):
            part = slice(a, a + side), slice(b, b + side)
            sent[part] = sparse_chunk(x[part].reshape(-1), k).reshape(side, side)
    return sent
