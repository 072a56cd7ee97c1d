"""`FiniteGuard`: a loss or gradient that is not finite, found out together, before the optimizer takes it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..layers.names import own_name, unwrap
from ..switching.job import Job


class FiniteGuard:
    """Asked between `backward` and `optimizer.step`: may this update be made?

    The answer is the same on every rank of the DDP or sharded model, so none steps or stops alone. It costs a
    pass over the gradients, an all-reduce of one byte a parameter tensor, and a wait for the device.

    A skipped update changes neither parameters nor moments. What the forward pass has changed already, such
    as the running statistics of a batch norm, stays changed. With a `GradScaler` unscale first, take "skip",
    and call `scaler.update()` in any case, so that the scale comes down.

    Args:
        model: plain, DDP, compiled or sharded. Its parameters are looked up at every call.
        on_bad: "raise" a FloatingPointError on all ranks, or "skip" the update with a warning.
        limit: so many skipped in a row raise all the same; a model that is lost does not come back.

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
        if limit < 1:
            raise ValueError(f"FiniteGuard: limit={limit} allows no update to be skipped; take 1 or more")
        self.model = model
        self.on_bad = on_bad
        self.limit = limit
        self.calls = 0
        self.skipped = 0  # in all
        self.in_a_row = 0  # up to now

    def __call__(self, loss: Tensor | None = None) -> bool:
        """True on all ranks or on none. Call it on every rank; without a loss the gradients alone are looked at."""
        workers = Job(self.model).workers
        named = [(own_name(name), p) for name, p in unwrap(self.model).named_parameters()]
        # A byte for each parameter, for each rank's loss and for each rank's gradients: 1 is bad.
        sizes = [len(named), workers.size, workers.size]
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=workers.device)
        parameters, losses, gradients = message.split(sizes)
        parameters.copy_(_bad_gradients([p for _, p in named], workers.device))
        gradients[workers.rank] = parameters.any()
        if loss is not None:
            losses[workers.rank] = ~torch.isfinite(loss.detach()).all()
        message = workers.largest(message)
        self.calls += 1
        if not message.any():
            self.in_a_row = 0
            return True
        parameters, losses, gradients = message.split(sizes)
        names = [name for (name, _), bad in zip(named, parameters.tolist(), strict=True) if bad]
        told = f"FiniteGuard, call {self.calls}: {_words(names, losses.tolist(), gradients.tolist())}"
        if self.on_bad == "raise":
            raise FloatingPointError(f'{told}; on_bad="skip" leaves such updates out')
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FloatingPointError(f"{told}; so it was {self.in_a_row} times in a row, which is the limit")
        self.skipped += 1
        if workers.rank == 0:
            warnings.warn(f"{told}; update skipped", RuntimeWarning, stacklevel=2)
        return False

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {"calls": self.calls, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.calls, self.skipped, self.in_a_row = state["calls"], state["skipped"], state["in_a_row"]


@torch.no_grad()
def _bad_gradients(params: list[nn.Parameter], device: torch.device) -> Tensor:
    """For each parameter whether its gradient holds an infinity or NaN."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for i, p in enumerate(params):
        if p.grad is not None:
            g = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            g = g._values() if g.is_sparse else g
            if g.numel():
                kinds.setdefault((g.device, g.dtype), {})[i] = g
    bad = torch.zeros(len(params), dtype=torch.bool, device=device)
    for gradients in kinds.values():
        # The largest entry, not the length: squares of finite numbers may overflow.
        largest = torch._foreach_norm(list(gradients.values()), math.inf)
        where = torch.tensor(list(gradients), device=device)
        bad[where] = ~torch.isfinite(torch.stack(list(largest))).to(device)
    return bad


def _words(names: list[str], losses: list[int], gradients: list[int]) -> str:
    """What is bad where. A process that is alone need not be told its rank."""

    def on(ranks: list[int]) -> str:
        which = ", ".join(str(rank) for rank, bad in enumerate(ranks) if bad)
        return f" on rank {which}" if len(ranks) > 1 else ""

    parts = []
    if any(losses):
        parts.append(f"the loss is not finite{on(losses)}")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"the gradient of {', '.join(names[:3])}{more} is not finite{on(gradients)}")
    return ", ".join(parts)
