"""`nonzero_macs`: MACs of a pruned network."""

from torch import nn

from ...layers import low_rank_type
from ...layers.names import named_modules
from ...planning.profile import Example, profile


def nonzero_macs(model: nn.Module, example: Example) -> int:
    """Count forward MACs without multiplications by zero weights, which common hardware does not skip.

    >>> import torch
    >>> layer = nn.Linear(4, 2, bias=False)
    >>> _ = layer.weight.data[0].zero_()
    >>> nonzero_macs(layer, torch.ones(3, 4))
    12
    """
    calls = profile(model, example).calls
    total = 0
    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None and name in calls:
            for x in (x for x in kind.matrices(module) if not x.lookup):
                weights = module.get_parameter(x.weight).detach()[x.index]
                used = int(weights.count_nonzero()) * x.used_blocks // x.blocks
                total += used * calls[name].positions[x.name]
    return total
