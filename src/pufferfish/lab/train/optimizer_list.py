"""`OptimizerList`: several optimizers that a training loop handles like one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim


class OptimizerList(list[optim.Optimizer]):
    """Optimizers that step together. The library takes it as what it is, a list of optimizers.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> pair = OptimizerList([optim.Muon([layer.weight], lr=0.1), optim.AdamW([layer.bias], lr=0.1)])
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> pair.step()
    >>> len(pair.param_groups), [list(state) for state in pair.state.values()]
    (2, [['momentum_buffer'], ['step', 'exp_avg', 'exp_avg_sq']])
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The state of all parameters."""
        return {p: state for optimizer in self for p, state in optimizer.state.items()}

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for optimizer in self:
            optimizer.zero_grad()
