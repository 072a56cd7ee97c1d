"""`LotteryTicket`: train, prune the smallest weights, rewind the others, train again, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor, nn

from ...optim.carry import Optimizers, as_list, check
from ...switching.job import Job
from .masks import Masks
from .rewind import copied, put_back, taken
from .round_cost import Cost, Round


class LotteryTicket:
    """Iterative magnitude pruning around your own loop.

    Weights are parameters of two dimensions or more. Gradients of pruned ones are zeroed in backward (before DDP's
    all-reduce and before clipping), the weights themselves after every `optimizer.step`: they are exactly zero, whatever
    the optimizer does. All ranks have rank 0's mask. The masked network is as large and as slow as before.

    Call `step` after every update, `next_round` at the end of every training; a schedule starts anew there.

    Args:
        model: plain, DDP or compiled; not sharded.
        optimizer: one or several, of the model's parameters.
        rounds: how often to prune; there is one training more.
        fraction: of the weights that are left, pruned in a round.
        scope: the smallest of the whole model ("global") or of each tensor ("layer").
        rewind: to the weights, batch statistics and optimizer state after so many updates; 0: as they are now.
        keep: names or patterns of parameters that are never pruned.

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
    >>> [int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1], ticket.cost().steps
    ([..., ...], 12)
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
        scope: Literal["global", "layer"] = "global",
        rewind: int = 0,
        keep: Iterable[str] = (),
    ) -> None:
        if rounds < 1 or rewind < 0:
            raise ValueError(
                f"LotteryTicket: rounds={rounds}, rewind={rewind}; take 1 round or more, and an update from 0 on"
            )
        if not 0 < fraction < 1:
            raise ValueError(f"LotteryTicket: fraction={fraction} is not between 0 and 1")
        if scope not in ("global", "layer"):
            raise ValueError(f'LotteryTicket: scope={scope!r} is neither "global" nor "layer"')
        self.model, self.optimizers = model, as_list(optimizer)
        check(self.optimizers)
        if not self.optimizers or Job(model).sharded:
            raise ValueError("LotteryTicket: it wants an optimizer, and a model that is not sharded")
        self.rounds, self.fraction, self.scope, self.rewind = rounds, fraction, scope, rewind
        self._masks = Masks(model, keep)
        self.total = self._masks.total
        self.done: list[Round] = []
        self._steps, self._before, self._since = 0, 0.0, time.perf_counter()
        self._early: dict[str, Any] | None = taken(model, self.optimizers) if rewind == 0 else None
        self._handles = self._masks.hold(self.optimizers)

    @property
    def round(self) -> int:
        """The round that is being trained, counted from 0, the dense one."""
        return len(self.done)

    @property
    def start(self) -> int:
        """The update at which a round's schedule starts: that of the rewound weights."""
        return self.rewind if self.round else 0

    @property
    def weights(self) -> int:
        """How many are not pruned."""
        return self._masks.left

    def masks(self) -> dict[str, Tensor]:
        """By name: which weights are left."""
        return {name: mask.bool() for name, mask in self._masks.of.items()}

    def step(self) -> None:
        """Count an update."""
        self._steps += 1
        if self._early is None and self._steps == self.rewind:
            self._early = taken(self.model, self.optimizers)

    def next_round(self) -> bool:
        """Prune and rewind; False, and nothing done, after the last round. On every rank, at the end of a round.

        Parameters stay the same tensors, gradients and the optimizer's state do not: a CUDA graph is captured anew.
        """
        if self.round == self.rounds:
            return False
        job = Job(self.model)
        about = "round or settings; all must call next_round alike"
        facts = (self.round, self._steps, self.rounds, self.fraction, self.scope, self.rewind, self.total)
        job.workers.agree(repr(facts), 0, about)
        job.workers.together(self._refuse)
        self.done.append(self._round())
        self._masks.prune(self.fraction, self.scope)
        for mask in self._masks.of.values():
            job.workers.share(mask, 0)
        self._rewind()
        self._steps, self._before, self._since = 0, 0.0, time.perf_counter()
        return True

    def cost(self, *, epoch: int | None = None, macs: int | None = None) -> Cost:
        """What all rounds took so far; with the updates of an epoch and the MACs of one update also in those."""
        rounds = (*self.done, self._round())
        steps = sum(r.steps for r in rounds)
        return Cost(
            rounds, steps, sum(r.seconds for r in rounds),
            None if epoch is None else steps / epoch, None if macs is None else steps * macs,
        )  # fmt: skip

    def remove(self) -> None:
        """Let the weights go: they are zero now, and trained from now on."""
        while self._handles:
            self._handles.pop().remove()

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text and tensors; `Checkpoint(scheduler=ticket)` keeps it beside the model and optimizer."""
        return {
            "masks": self.masks(),
            "early": self._early,
            "rounds": [asdict(r) for r in self.done],
            "steps": self._steps,
            "seconds": self._seconds(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on inside the round that was saved; model and optimizer are loaded by themselves."""
        self._masks.load(state["masks"])
        self._early = copied(state["early"])
        self.done = [Round(**r) for r in state["rounds"]]
        self._steps, self._before, self._since = state["steps"], state["seconds"], time.perf_counter()

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._since

    def _round(self) -> Round:
        return Round(self.weights, self._steps, self._seconds())

    def _refuse(self) -> None:
        """What cannot be pruned, before anything is changed."""
        if self._early is None or self._steps == 0:
            raise ValueError(
                f"LotteryTicket: rewind={self.rewind}, and this round had {self._steps} updates; train longer, and call "
                "ticket.step() after each"
            )
        self._masks.refuse()

    def _rewind(self) -> None:
        assert self._early is not None
        put_back(self.model, self.optimizers, self._early)
        self._masks.apply()
        for optimizer in self.optimizers:
            self._masks.apply_to_state(optimizer)
