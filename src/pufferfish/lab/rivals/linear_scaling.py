"""`linear_scaling`: the learning rate for large batches, scaled linearly, with a gradual warm-up."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR


def linear_scaling(
    optimizer: Optimizer,
    *,
    base_batch: int,
    batch: int,
    warm_up: int,
    after: Callable[[Optimizer], LRScheduler],
) -> LRScheduler:
    """Scale the learning rate by k for a batch k times as large (Goyal et al. 2017), rising from the optimizer's rate.

    Args:
        optimizer: with the learning rate for `base_batch`.
        batch: samples per update, over all workers.
        warm_up: updates until the full rate; call the scheduler's `step` after every update.
        after: builds the schedule that follows; it sees the full rate and counts from the end of the warm-up.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> halve = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    >>> scheduler = linear_scaling(optimizer, base_batch=256, batch=1024, warm_up=3, after=halve)
    >>> for _ in range(6):
    ...     print(f"{scheduler.get_last_lr()[0]:.2f}", end=" ")
    ...     optimizer.step()
    ...     scheduler.step()
    0.10 0.20 0.30 0.40 0.20 0.10
    """
    k = batch / base_batch
    for group in optimizer.param_groups:
        group["lr"] *= k
    rise = LambdaLR(optimizer, lambda done: 1.0 if done >= warm_up else (1 + (k - 1) * done / warm_up) / k)
    return SequentialLR(optimizer, [rise, after(optimizer)], [warm_up])
