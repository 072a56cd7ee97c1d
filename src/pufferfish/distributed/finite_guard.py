"""`FiniteGuard`: detects losses and gradients that are not finite, on all workers, before the optimizer uses them."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..layers import local_part, own_name, rebuilt, unwrap
from .ddp import Job


class FiniteGuard:
    """Check that loss and gradients are finite: call it between `backward` and `optimizer.step`.

    It returns the same answer on every worker of the DDP or sharded model, so that all of them skip an update or none. It
    costs a pass over the gradients, an all-reduce of one byte per parameter tensor, and a synchronization with the
    device.

    A skipped update changes neither parameters nor optimizer state. Changes by the forward pass, such as the running
    statistics of a batch norm, remain. With a `GradScaler`, call `unscale_` first, use "skip", and call
    `scaler.update()` in any case, so that the scale is reduced.

    Args:
        model: Plain, DDP, compiled or sharded. Its parameters are looked up at every call.
        on_bad: "raise" a FloatingPointError on all workers, or "skip" the update with a warning.
        limit: Number of consecutive skipped updates that raises an error in any case.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> guard = FiniteGuard(model, on_bad="skip")
    >>> for x in (torch.ones(2), torch.tensor([1.0, math.nan])):
    ...     loss = model(x).sum()
    ...     loss.backward()
    ...     if guard(loss):
    ...         optimizer.step()
    ...     optimizer.zero_grad()
    >>> guard.skipped, bool(model.weight.isfinite().all())
    (1, True)
    """

    def __init__(self, model: nn.Module, on_bad: Literal["raise", "skip"] = "raise", limit: int = 10) -> None:
        if on_bad not in ("raise", "skip"):
            raise ValueError(f'FiniteGuard: on_bad={on_bad!r} is neither "raise" nor "skip"')
        self.model = model
        self.on_bad = on_bad
        self.limit = limit
        self.calls = 0
        self.skipped = 0  # in total
        self.in_a_row = 0  # consecutive skips until now

    def __call__(self, loss: Tensor | None = None) -> bool:
        """Whether the update can be made: True on all workers or on none. Call it on every worker.

        Args:
            loss: checked together with the gradients, if given.
        """
        self.model = rebuilt(self.model)
        workers = Job(self.model, "FiniteGuard").workers
        named = [(own_name(name), p) for name, p in unwrap(self.model).named_parameters()]
        # A byte for each parameter, for the loss of each worker and for the gradients of each worker: 1 is bad.
        sizes = [len(named), workers.size, workers.size]
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=workers.device)
        parameters, losses, gradients = message.split(sizes)
        parameters.copy_(_bad_gradients([p for _, p in named], workers.device))
        gradients[workers.rank] = parameters.any()
        if loss is not None:
            losses[workers.rank] = ~torch.isfinite(loss.detach()).all()
        message = workers.max(message)
        self.calls += 1
        if not message.any():
            self.in_a_row = 0
            return True
        parameters, losses, gradients = message.split(sizes)
        names = [name for (name, _), bad in zip(named, parameters.tolist(), strict=True) if bad]
        problem = f"FiniteGuard, call {self.calls}: {_describe(names, losses.tolist(), gradients.tolist())}"
        if self.on_bad == "raise":
            raise FloatingPointError(f'{problem}; use on_bad="skip" to skip such updates')
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FloatingPointError(f"{problem}; {self.in_a_row} times in a row, which is the limit")
        self.skipped += 1
        if workers.rank == 0:
            warnings.warn(f"{problem}; update skipped", RuntimeWarning, stacklevel=2)
        return False

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {"calls": self.calls, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counts."""
        self.calls, self.skipped, self.in_a_row = state["calls"], state["skipped"], state["in_a_row"]


@torch.no_grad()
def _bad_gradients(params: list[nn.Parameter], device: torch.device) -> Tensor:
    """Whether the gradient of each parameter contains an infinity or NaN."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for i, p in enumerate(params):
        if p.grad is not None:
            g = local_part(p.grad)
            g = g._values() if g.is_sparse else g
            if g.numel():
                kinds.setdefault((g.device, g.dtype), {})[i] = g
    bad = torch.zeros(len(params), dtype=torch.bool, device=device)
    for gradients in kinds.values():
        # The maximum norm: the Euclidean norm of finite numbers may overflow.
        largest = torch._foreach_norm(list(gradients.values()), math.inf)
        where = torch.tensor(list(gradients), device=device)
        bad[where] = ~torch.isfinite(torch.stack(list(largest))).to(device)
    return bad


def _describe(names: list[str], losses: list[int], gradients: list[int]) -> str:
    """Text of what is not finite, and on which ranks if there are several."""

    def on(bad: list[int]) -> str:
        ranks = ", ".join(str(rank) for rank, is_bad in enumerate(bad) if is_bad)
        return f" on rank {ranks}" if len(bad) > 1 else ""

    parts = []
    if any(losses):
        parts.append(f"the loss is not finite{on(losses)}")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"the gradient of {', '.join(names[:3])}{more} is not finite{on(gradients)}")
    return ", ".join(parts)
