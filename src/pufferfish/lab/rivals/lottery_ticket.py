"""`LotteryTicket`: train, prune the smallest weights, rewind the others and train again, round after round."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from ...distributed.ddp import Job
from ...lowrank.optimizers import Optimizers, as_list, check_optimizers
from .pruning_masks import PruningMasks
from .snapshot import restore_snapshot, snapshot


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
        self.model, self.optimizers = model, as_list(optimizer)
        check_optimizers(self.optimizers)
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
