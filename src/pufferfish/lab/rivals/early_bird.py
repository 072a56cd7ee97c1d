"""`EarlyBird`: watch which channels' scales stay small, and once that has settled, remove those channels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.rewrap import check_rewrap
from ...optim.carry import Optimizers, as_list, check
from ...switching.job import Job
from .early_bird_ticket import Ticket
from .norm_scales import Pull, removable, sizes
from .remove_channels import refuse_unlike, remove_


class EarlyBird:
    """Early-Bird tickets around your own loop, for chains and sums of convolutions (ResNets, VGGs).

    Until the ticket is drawn every `optimizer.step` pulls the scales γ of the batch norms to zero (L1, on the gradients). After
    each epoch a mask says which channels have the smallest |γ| of the whole network. Once the last masks are alike
    (normalised Hamming distance between any two of them) those channels are removed, in the model and the optimizer's
    state, and training goes on with the small network. Channels that are added together count once, by the mean of
    their |γ|, and go together. All ranks have rank 0's mask.

    Args:
        model: plain, DDP or compiled; it stays the same object.
        optimizer: one or several.
        ratio: share of the channels to remove.
        l1: how hard γ is pulled.
        last: how many masks have to be alike.
        distance: how much any two of them may differ at most, as a share of the channels.
        multiple: the channels of a group that stay are rounded to the nearest multiple, at least one; GPUs are slow with
            odd numbers. The paper's is 1.
        latest: the epoch at which the ticket is drawn in any case; None waits.

    >>> from pufferfish.lab.models import resnet18
    >>> model = resnet18(width=8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    >>> bird = EarlyBird(model, optimizer, ratio=0.5, multiple=1, latest=2)
    >>> for epoch in range(3):
    ...     if bird.begin_epoch(epoch):
    ...         print(str(bird.ticket).splitlines()[0])
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
        l1: float = 1e-4,
        last: int = 5,
        distance: float = 0.1,
        multiple: int = 8,
        latest: int | None = None,
    ) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"EarlyBird: ratio={ratio} is not a share between 0 and 1")
        if l1 < 0 or last < 2 or not 0 < distance <= 1 or multiple < 1:
            raise ValueError(
                f"EarlyBird: l1={l1}, last={last}, distance={distance}, multiple={multiple}; take 0 or more, 2 or more "
                "masks, a share up to 1 and 1 or more"
            )
        self.model, self.optimizers = model, as_list(optimizer)
        check(self.optimizers)
        job = Job(model)
        if job.sharded:
            raise ValueError("EarlyBird: channels of sharded models are not removed")
        if job.ddp is not None:
            check_rewrap(job.ddp, {})
        self.ratio, self.l1, self.last, self.distance = ratio, l1, last, distance
        self.multiple, self.latest = multiple, latest
        self.ticket: Ticket | None = None
        self.masks: list[Tensor] = []  # the last ones: True where a channel stays
        self._epoch = 0  # of the last mask
        self._groups = removable(job.inner)
        self._pull = Pull(model, self._groups, self.optimizers, l1)

    @property
    def distances(self) -> list[float]:
        """Between any two of the last masks, as shares of the channels."""
        return [float((a != b).float().mean()) for a, b in combinations(self.masks, 2)]

    def begin_epoch(self, epoch: int) -> bool:
        """Call at the start of every epoch, on every rank. True when channels were removed just now."""
        if self.ticket is not None or epoch <= self._epoch:
            return False
        job = Job(self.model)
        facts = (epoch, self.ratio, self.l1, self.last, self.distance, self.multiple, self.latest)
        job.workers.agree(repr(facts), 0, "epoch or settings; all must call begin_epoch alike")
        scores = job.workers.together(lambda: sizes(self.model, self._groups))
        mask = torch.ones(len(scores), dtype=torch.uint8, device=scores.device)
        mask[scores.argsort(stable=True)[: round(self.ratio * len(scores))]] = 0
        self.masks = [*self.masks, job.workers.share(mask, 0).bool().cpu()][-self.last :]
        self._epoch = epoch
        alike = len(self.masks) == self.last and max(self.distances) < self.distance
        if not alike and (self.latest is None or epoch < self.latest):
            return False
        job.workers.share(scores, 0)
        self._draw(job, epoch, scores.cpu())
        return True

    def remove(self) -> None:
        """Stop pulling."""
        self._pull.remove()

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text and tensors, for any checkpoint."""
        ticket = None if self.ticket is None else copy.deepcopy(vars(self.ticket))
        return {"epoch": self._epoch, "masks": list(self.masks), "ticket": ticket}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved one would; a model that had lost channels loses them here, and then needs its weights."""
        saved = None if state["ticket"] is None else Ticket(**copy.deepcopy(state["ticket"]))
        if self.ticket is None and saved is not None:
            if saved.sizes != self._sizes():
                raise ValueError("EarlyBird: the saved ticket is of another model; build that one")
            self._remove(Job(self.model), saved.kept)
        elif self.ticket is not None and (saved is None or saved.kept != self.ticket.kept):
            raise ValueError("EarlyBird: this model has lost channels that the saved one has; build it anew")
        self._epoch, self.masks, self.ticket = state["epoch"], list(state["masks"]), saved

    def _sizes(self) -> dict[str, int]:
        """Channels that the groups had at the start."""
        return {group.norms[0]: group.size for group in self._groups}

    def _draw(self, job: Job, epoch: int, scores: Tensor) -> None:
        """By the last mask, in whole multiples."""
        counts = [group.size for group in self._groups]
        masks, kept = self.masks[-1].split(counts), {}
        for group, mask, score in zip(self._groups, masks, scores.split(counts), strict=True):
            count = max(round(int(mask.sum()) / self.multiple), 1) * self.multiple
            best = score.argsort(descending=True, stable=True)[:count]
            kept[group.norms[0]] = sorted(best.tolist())
        before = _parameters(job.inner)
        self._remove(job, kept)
        job.workers.same(job.inner.parameters())
        self.ticket = Ticket(epoch, self._sizes(), kept, (before, _parameters(job.inner)))

    def _remove(self, job: Job, kept: Mapping[str, list[int]]) -> None:
        chosen = [(group, torch.tensor(kept[group.norms[0]])) for group in self._groups]
        job.workers.together(lambda: refuse_unlike(job.inner, chosen, self.optimizers))
        remove_(job.inner, chosen, self.optimizers)
        job.rewrapped({})
        self.remove()


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
