"""`Case`: an architecture of the zoo, and functions that create inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def first_tensor(value: Any) -> Tensor:
    """The first floating-point tensor of a nested output."""
    return next(t for t in _tensors(value) if t.is_floating_point())


def all_tensors(value: Any) -> Tensor:
    """All floating-point tensors of a nested output, as one flat tensor."""
    return torch.cat([t.flatten() for t in _tensors(value) if t.is_floating_point()])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture with example inputs."""

    build: Callable[[], nn.Module]
    """Build the model with random weights, which depend only on torch.manual_seed."""
    inputs: Callable[[], Inputs]
    """Create args and kwargs, the same at each call."""
    output: Callable[[Any], Tensor] = first_tensor
    """Select a differentiable float tensor from the output."""
    needs: str | None = None
    """Package that `build` needs."""
    linear: str | None = None
    """Dotted name of the model's own type of Linear, to register."""


def generator() -> torch.Generator:
    """A freshly seeded generator, so that inputs do not depend on (or disturb) the global one."""
    return torch.Generator().manual_seed(1234)


def normal(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Normal float tensors of these shapes, as positional arguments."""

    def make() -> Inputs:
        g = generator()
        return tuple(torch.randn(shape, generator=g) for shape in shapes), {}

    return make


def tokens(vocab: int, *shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Integer tensors below vocab of these shapes, as positional arguments."""

    def make() -> Inputs:
        g = generator()
        return tuple(torch.randint(vocab, shape, generator=g) for shape in shapes), {}

    return make
