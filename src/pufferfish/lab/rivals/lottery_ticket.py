"""`LotteryTicket`: rounds of training and pruning, each rewound to the same early weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from ...distributed.ddp import Job
from ...layers.names import own_name, unwrap
from ...lowrank.by_name import load_optimizer, names_by_id, optimizer_state
from ...lowrank.optimizers import Optimizers, check_optimizers


@dataclass(frozen=True)
class PruningRound:
    """One round of training.

    Args:
        weights: number of weights that are not pruned.
        steps: number of updates.
    """

    weights: int
    steps: int


class LotteryTicket:
    """Iterative magnitude pruning (Frankle & Carbin 2019) in your own loop.

    Weights are parameters of two or more dimensions. Gradients of pruned weights are zeroed in backward (before DDP's
    all-reduce and before clipping) and the weights themselves after every `optimizer.step`, so they are exactly zero
    with any optimizer. All workers use the mask of rank 0. The masked network is as large and as slow as before.

    Call `step` after every update and `next_round` at the end of every round; start learning-rate schedules over there.

    Args:
        model: plain, DDP or compiled; not sharded.
        optimizer: one or several, of the model's parameters.
        rounds: how often to prune; the model is trained once more than that.
        fraction: of the remaining weights to prune in a round.
        rewind: restore weights, batch statistics and optimizer state as of this many updates; 0: the initial ones.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    >>> ticket = LotteryTicket(model, optimizer, rounds=2, fraction=0.5)
    >>> while True:
    ...     for step in range(ticket.start, 4):
    ...         model(torch.randn(4, 8)).square().mean().backward()
    ...         optimizer.step()
    ...         ticket.step()
    ...         optimizer.zero_grad()
    ...     if not ticket.next_round():
    ...         break
    >>> [int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1], [r.steps for r in ticket.trained()]
    ([..., ...], [4, 4, 4])
    >>> ticket.weights, ticket.total
    (40, 160)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        rounds: int = 5,
        fraction: float = 0.2,
        rewind: int = 0,
    ) -> None:
        if rounds < 1 or rewind < 0:
            raise ValueError(
                f"LotteryTicket: rounds={rounds}, rewind={rewind}; rounds must be at least 1, rewind at least 0"
            )
        if not 0 < fraction < 1:
            raise ValueError(f"LotteryTicket: fraction={fraction} is not between 0 and 1")
        self.model, self.optimizers = model, check_optimizers(optimizer)
        if not self.optimizers or Job(model).sharded:
            raise ValueError("LotteryTicket: it needs an optimizer, and a model that is not sharded")
        self.rounds, self.fraction, self.rewind = rounds, fraction, rewind
        self._masks = PruningMasks(model)
        self.total = self._masks.total
        self.done: list[PruningRound] = []
        self._steps = 0
        self._early: dict[str, Any] | None = snapshot(model, self.optimizers) if rewind == 0 else None
        self._masks.register_hooks(self.optimizers)

    @property
    def round(self) -> int:
        """Current round; 0 is the dense one."""
        return len(self.done)

    @property
    def start(self) -> int:
        """Update at which the current round starts its schedule: that of the rewound weights."""
        return self.rewind if self.round else 0

    @property
    def weights(self) -> int:
        """Number of weights that are not pruned."""
        return self._masks.remaining

    def masks(self) -> dict[str, Tensor]:
        """Return the masks by parameter name; True where a weight remains."""
        return {name: mask.bool() for name, mask in self._masks.masks.items()}

    def step(self) -> None:
        """Count an update."""
        self._steps += 1
        if self._early is None and self._steps == self.rewind:
            self._early = snapshot(self.model, self.optimizers)

    def next_round(self) -> bool:
        """Prune and rewind at the end of a round, on every worker; returns False and does nothing after the last round.

        Parameters stay the same tensors; gradients and optimizer state are replaced.
        """
        if self.round == self.rounds:
            return False
        job = Job(self.model)
        facts = (self.round, self._steps, self.rounds, self.fraction, self.rewind, self.total)
        job.workers.agree(repr(facts), 0, "round or settings; make the same call on all workers")
        job.workers.run_on_all(self._check_prunable)
        self.done.append(self._current_round())
        self._masks.prune(self.fraction)
        for mask in self._masks.masks.values():
            job.workers.broadcast_tensor(mask, 0)
        self._rewind()
        self._steps = 0
        return True

    def trained(self) -> list[PruningRound]:
        """Return all rounds so far, with the current one."""
        return [*self.done, self._current_round()]

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, text and tensors; `Checkpoint(scheduler=ticket)` saves them with model and optimizer."""
        return {
            "masks": self.masks(),
            "early": self._early,
            "rounds": [asdict(r) for r in self.done],
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume inside the saved round; load model and optimizer separately."""
        self._masks.load(state["masks"])
        self._early = copy.deepcopy(state["early"])
        self.done = [PruningRound(**r) for r in state["rounds"]]
        self._steps = state["steps"]

    def _current_round(self) -> PruningRound:
        return PruningRound(self.weights, self._steps)

    def _check_prunable(self) -> None:
        if self._early is None or self._steps == 0:
            raise ValueError(
                f"LotteryTicket: rewind={self.rewind}, but this round had only {self._steps} updates; train longer, and call "
                "ticket.step() after each update"
            )
        self._masks.check_finite()

    def _rewind(self) -> None:
        assert self._early is not None
        restore_snapshot(self.model, self.optimizers, self._early)
        self._masks.apply()
        for optimizer in self.optimizers:
            self._masks.apply_to_state(optimizer)


class PruningMasks:
    """One mask for every parameter of two or more dimensions; the masks stay the same tensors.

    >>> model = nn.Linear(4, 2)
    >>> masks = PruningMasks(model)
    >>> masks.prune(0.25)
    >>> masks.apply()
    >>> masks.remaining, masks.total, int(model.weight.count_nonzero())
    (6, 8, 6)
    """

    def __init__(self, model: nn.Module) -> None:
        named = unwrap(model).named_parameters()
        self.weights = {own_name(n): p for n, p in named if p.dim() > 1 and p.requires_grad}
        if not self.weights:
            raise ValueError("LotteryTicket: the model has no weights of two or more dimensions to prune")
        self.masks = {name: torch.ones_like(p, requires_grad=False) for name, p in self.weights.items()}
        self.total = sum(p.numel() for p in self.weights.values())

    @property
    def remaining(self) -> int:
        """Number of weights that are not pruned."""
        return sum(int(mask.count_nonzero()) for mask in self.masks.values())

    def register_hooks(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Zero gradients of pruned weights in backward, and the weights after every step."""
        for name, p in self.weights.items():
            p.register_hook(lambda grad, name=name: grad * self.masks[name])
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self.apply())

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the pruned weights."""
        torch._foreach_mul_(list(self.weights.values()), list(self.masks.values()))

    @torch.no_grad()
    def apply_to_state(self, optimizer: optim.Optimizer) -> None:
        """Zero the optimizer's state of the pruned weights."""
        for name, p in self.weights.items():
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    value.mul_(self.masks[name])

    def check_finite(self) -> None:
        """Raise ValueError if a weight is inf or NaN."""
        for name, p in self.weights.items():
            if not torch.isfinite(p.detach()).all():
                raise ValueError(f"{name}: it contains inf or NaN; nothing was pruned")

    @torch.no_grad()
    def prune(self, fraction: float) -> None:
        """Prune a fraction of the remaining weights, the smallest of all."""
        mask = torch.cat([mask.flatten() for mask in self.masks.values()])
        magnitude = torch.cat([p.detach().abs().flatten() for p in self.weights.values()]).float()
        magnitude[mask == 0] = torch.inf
        mask[magnitude.topk(round(fraction * self.remaining), largest=False).indices] = 0
        parts = mask.split([m.numel() for m in self.masks.values()])
        for own, part in zip(self.masks.values(), parts, strict=True):
            own.copy_(part.view_as(own))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load the masks of another run of the same model."""
        if {n: m.shape for n, m in saved.items()} != {n: m.shape for n, m in self.masks.items()}:
            raise ValueError("LotteryTicket: the saved masks are for a model with other weights")
        for name, mask in self.masks.items():
            mask.copy_(saved[name])
        self.apply()


def snapshot(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> dict[str, Any]:
    """Copy the weights, batch statistics and optimizer state.

    >>> layer = nn.Linear(2, 2)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> early, bias = snapshot(layer, [sgd]), layer.bias.detach().clone()
    >>> _ = layer.bias.data.add_(1.0)
    >>> restore_snapshot(layer, [sgd], early)
    >>> torch.equal(layer.bias, bias)
    True
    """
    names = names_by_id(model)
    states = [optimizer_state(optimizer, names) for optimizer in optimizers]
    return copy.deepcopy({"model": _tensors(model), "optimizers": states})


@torch.no_grad()
def restore_snapshot(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], saved: Mapping[str, Any]
) -> None:
    """Restore a snapshot in place: parameters stay the same tensors; gradients are cleared."""
    for name, x in _tensors(model).items():
        x.copy_(saved["model"][name])
    names = names_by_id(model)
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        load_optimizer(optimizer, names, copy.deepcopy(state))
    for p in unwrap(model).parameters():
        p.grad = None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, not copied."""
    return {own_name(name): x for name, x in unwrap(model).state_dict().items()}
