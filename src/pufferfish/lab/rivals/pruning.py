"""Pruning as a `ModelChange`: `EarlyBird`, which removes channels early, and lottery tickets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.files import SavedCheckpoint
from ...checkpoint.folder import newest_checkpoint
from ...distributed.ddp import Job, check_rewrap
from ...layers import low_rank_type
from ...layers.names import named_modules
from ...lowrank.optimizers import Optimizers, check_optimizers
from ...lowrank.rewrite import commit
from ...measure import RunLog
from ...planning.profile import Example, profile
from ..method_name import PruningMethod
from ..model_change import ModelChange
from .channels import L1Penalty, channel_scores, check_optimizer_state, prunable_groups, remove_channels_
from .lottery_ticket import LotteryTicket


class PruningChange(ModelChange):
    """A `ModelChange` by pruning; a checkpoint saves its state as the scheduler."""

    pruner: Any  # has state_dict and load_state_dict

    @property
    def checkpoint_parts(self) -> dict[str, Any]:
        return {"scheduler": self}

    def restore(self, folder: Path) -> None:
        state = Job(self.model).workers.run_on_all(lambda: saved_pruning_state(folder))
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the pruner's state."""
        state: dict[str, Any] = self.pruner.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the pruner's state; removes the channels that its model had lost."""
        self.pruner.load_state_dict(state)


class LotteryTicketChange(PruningChange):
    """Rounds of a recipe's epochs with a `LotteryTicket`, rewound to the end of the first epoch.

    Args:
        epochs: of the first round; later rounds start at the rewound epoch.
        rounds: as in `LotteryTicket`.

    >>> import torch
    >>> model = nn.Linear(8, 8)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> change = LotteryTicketChange(model, sgd, epochs=4, steps_per_epoch=10, rounds=2)
    >>> change.epochs, change.schedule_position(39), change.schedule_position(40)
    (10, (39, 40), (10, 40))
    """

    pruner: LotteryTicket

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int, rounds: int
    ) -> None:
        self._rewind_epoch = 1 if epochs > 1 else 0
        self._first_epochs, self._later_epochs = epochs, epochs - self._rewind_epoch  # of a round
        total = epochs + rounds * self._later_epochs
        super().__init__(model, epochs=total, steps_per_epoch=steps_per_epoch)
        rewind = self._rewind_epoch * steps_per_epoch
        self.pruner = LotteryTicket(model, optimizer, rounds=rounds, rewind=rewind)

    @property
    def parameters(self) -> int:
        return super().parameters - self.pruner.total + self.pruner.weights

    @property
    def summary(self) -> str:
        pruner = self.pruner
        left = f"{pruner.weights:,} of {pruner.total:,} weights left"
        return f"Lottery ticket, round {pruner.round} of {pruner.rounds}: {left}"

    def begin_epoch(self, epoch: int) -> bool:
        changed = False
        while self.pruner.round < self._round(epoch):
            changed = self.pruner.next_round()
        return changed

    def after_step(self) -> None:
        self.pruner.step()

    def schedule_position(self, step: int) -> tuple[int, int]:
        repeated = self._round(step // self.steps_per_epoch) * self._later_epochs
        return step - repeated * self.steps_per_epoch, self._first_epochs * self.steps_per_epoch

    def forward_macs(self, example: Example) -> int:
        """Return the MACs of a forward pass without multiplications by zero weights."""
        return nonzero_macs(self.model, example)

    def results(self, log: RunLog) -> dict[str, Any]:
        trainings = [{"weights": r.weights, "steps": r.steps} for r in self.pruner.trained()]
        return super().results(log) | {"epochs": self.epochs, "trainings": trainings}

    def _round(self, epoch: int) -> int:
        return max(0, (epoch - self._rewind_epoch) // self._later_epochs)


class EarlyBirdChange(PruningChange):
    """An `EarlyBird` ticket in a recipe's epochs, drawn in the middle of the run at the latest."""

    pruner: EarlyBird

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int, ratio: float
    ) -> None:
        if epochs < 2:
            raise ValueError(
                f"early-bird: a ticket is drawn between epochs, so at least 2 are needed, not {epochs}"
            )
        super().__init__(model, epochs=epochs, steps_per_epoch=steps_per_epoch)
        self.pruner = EarlyBird(model, optimizer, ratio=ratio, latest=epochs // 2)

    @property
    def summary(self) -> str:
        return str(self.pruner.ticket or "No Early-Bird ticket was drawn")

    def begin_epoch(self, epoch: int) -> bool:
        return self.pruner.begin_epoch(epoch)

    def results(self, log: RunLog) -> dict[str, Any]:
        ticket = self.pruner.ticket
        return super().results(log) | {"epochs": self.epochs, "drawn_after": ticket and ticket.epoch}


def saved_pruning_state(folder: Path) -> dict[str, Any] | None:
    """Return the state in the newest checkpoint in `folder`; None without a checkpoint."""
    newest = newest_checkpoint(folder, "raise") if folder.is_dir() else None
    if newest is None:
        return None
    state: dict[str, Any] | None = SavedCheckpoint(Path(newest[0])).training["parts"].get("scheduler")
    return state


def build_pruning_change(
    method: PruningMethod, model: nn.Module, optimizer: Optimizers, *, epochs: int, steps_per_epoch: int
) -> PruningChange:
    """Build the change of a pruning method, for a recipe of `epochs`."""
    length = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    if method.ratio is None:
        return LotteryTicketChange(model, optimizer, **length, rounds=method.rounds)
    return EarlyBirdChange(model, optimizer, **length, ratio=method.ratio)


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


#: Weight of the penalty on γ.
L1 = 1e-4
#: Number of masks that have to be similar, and the largest distance between any two of them, a fraction of the channels.
LAST, DISTANCE = 5, 0.1


@dataclass(frozen=True)
class EarlyBirdTicket:
    """Channels that remain in the model. A group of channels has the name of its first batch norm.

    Args:
        epoch: number of epochs trained before.
        sizes: number of channels of each group before.
        kept: indices of the remaining channels of each group.
        parameters: number of parameters of the model, before and after.

    >>> print(EarlyBirdTicket(4, {"bn1": 4}, {"bn1": [0, 2]}, (1000, 400)))
    Early-Bird ticket drawn after 4 epochs: 1,000 → 400 parameters
    """

    epoch: int
    sizes: dict[str, int]
    kept: dict[str, list[int]]
    parameters: tuple[int, int]

    def __str__(self) -> str:
        before, after = self.parameters
        return f"Early-Bird ticket drawn after {self.epoch} epochs: {before:,} → {after:,} parameters"


class EarlyBird:
    """Early-Bird tickets (You et al. 2020) in your own loop, for chains and sums of convolutions (ResNets, VGGs).

    Until the ticket is drawn, every `optimizer.step` adds an L1 penalty on the scales γ of the batch norms to the
    gradients. After each epoch a mask marks the channels with the smallest |γ| of the whole network. Once the last masks
    are similar (normalised Hamming distance between any two of them), those channels are removed from the model and the
    optimizer's state, and training continues with the smaller network. Channels that are added to each other count
    once, by the mean of their |γ|, and are removed together. All workers use the mask of rank 0.

    Args:
        model: plain, DDP or compiled; it stays the same object.
        optimizer: one or several.
        ratio: fraction of the channels to remove.
        multiple: remaining channels of a group are rounded to the nearest multiple, at least one multiple; GPUs are slow
            with odd numbers. The paper's is 1.
        latest: epoch at which the ticket is drawn in any case; None waits until the masks settle.

    >>> from pufferfish.lab.models import resnet18
    >>> model = resnet18(channels=8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    >>> bird = EarlyBird(model, optimizer, ratio=0.5, multiple=1, latest=2)
    >>> for epoch in range(3):
    ...     if bird.begin_epoch(epoch):
    ...         print(bird.ticket)
    ...     model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    Early-Bird ticket drawn after 2 epochs: 176,386 → ... parameters
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        ratio: float = 0.5,
        multiple: int = 8,
        latest: int | None = None,
    ) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"EarlyBird: ratio={ratio} is not between 0 and 1")
        self.model, self.optimizers = model, check_optimizers(optimizer)
        job = Job(model)
        if job.sharded:
            raise ValueError("EarlyBird: sharded models are not supported")
        check_rewrap(job.ddp)
        self.ratio, self.multiple, self.latest = ratio, multiple, latest
        self.ticket: EarlyBirdTicket | None = None
        self.masks: list[Tensor] = []  # the last ones; True where a channel remains
        self._epoch = 0  # of the last mask
        self._groups = prunable_groups(job.inner)
        self._penalty = L1Penalty(model, self._groups, self.optimizers, L1)

    @property
    def distances(self) -> list[float]:
        """Distances between any two of the last masks, as fractions of the channels."""
        return [float((a != b).float().mean()) for a, b in combinations(self.masks, 2)]

    def begin_epoch(self, epoch: int) -> bool:
        """Update the mask at the start of an epoch, on every worker. True if channels were removed."""
        if self.ticket is not None or epoch <= self._epoch:
            return False
        job = Job(self.model)
        facts = (epoch, self.ratio, self.multiple, self.latest)
        job.workers.agree(repr(facts), 0, "epoch or settings; make the same call on all workers")
        scores = job.workers.run_on_all(lambda: channel_scores(self.model, self._groups))
        mask = torch.ones(len(scores), dtype=torch.uint8, device=scores.device)
        mask[scores.argsort(stable=True)[: round(self.ratio * len(scores))]] = 0
        self.masks = [*self.masks, job.workers.broadcast_tensor(mask, 0).bool().cpu()][-LAST:]
        self._epoch = epoch
        settled = len(self.masks) == LAST and max(self.distances) < DISTANCE
        if not settled and (self.latest is None or epoch < self.latest):
            return False
        job.workers.broadcast_tensor(scores, 0)
        self._draw(job, epoch, scores.cpu())
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, text and tensors, for any checkpoint."""
        ticket = None if self.ticket is None else copy.deepcopy(vars(self.ticket))
        return {"epoch": self._epoch, "masks": list(self.masks), "ticket": ticket}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; removes the channels that its model had lost. Load the weights afterwards."""
        saved = None if state["ticket"] is None else EarlyBirdTicket(**copy.deepcopy(state["ticket"]))
        if self.ticket is None and saved is not None:
            if saved.sizes != self._group_sizes():
                raise ValueError("EarlyBird: the saved ticket belongs to another model; build that model")
            self._remove_channels(Job(self.model), saved.kept)
        elif self.ticket is not None and (saved is None or saved.kept != self.ticket.kept):
            raise ValueError(
                "EarlyBird: this model lacks channels that the saved one has; load it into a new model"
            )
        self._epoch, self.masks, self.ticket = state["epoch"], list(state["masks"]), saved

    def _group_sizes(self) -> dict[str, int]:
        """Number of channels of each group before removal."""
        return {group.norms[0]: group.size for group in self._groups}

    def _draw(self, job: Job, epoch: int, scores: Tensor) -> None:
        """Remove channels by the last mask, in whole multiples."""
        counts = [group.size for group in self._groups]
        masks, kept = self.masks[-1].split(counts), {}
        for group, mask, score in zip(self._groups, masks, scores.split(counts), strict=True):
            count = max(round(int(mask.sum()) / self.multiple), 1) * self.multiple
            best = score.argsort(descending=True, stable=True)[:count]
            kept[group.norms[0]] = sorted(best.tolist())
        before = _parameter_count(job.inner)
        self._remove_channels(job, kept)
        self.ticket = EarlyBirdTicket(epoch, self._group_sizes(), kept, (before, _parameter_count(job.inner)))

    def _remove_channels(self, job: Job, kept: Mapping[str, list[int]]) -> None:
        kept_indices = [(group, torch.tensor(kept[group.norms[0]])) for group in self._groups]
        job.workers.run_on_all(lambda: check_optimizer_state(job.inner, kept_indices, self.optimizers))
        remove_channels_(job.inner, kept_indices, self.optimizers)
        commit([], wrappers=[job.ddp])
        self._penalty.remove()


def _parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
