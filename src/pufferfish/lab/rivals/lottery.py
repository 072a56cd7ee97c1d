"""`LotteryTicket`: train, prune the smallest weights, rewind the others, train again, round after round."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from ...checkpoint.byname import load_optimizer, names_of, optimizer_state
from ...job import Job
from ...names import own_name, unwrap
from ...optim import Optimizers, as_list, check
from .rounds import Cost, Round


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
        self._weights = _prunable(unwrap(model), tuple(keep))
        self._masks = {name: torch.ones_like(p, requires_grad=False) for name, p in self._weights.items()}
        self.total = sum(p.numel() for p in self._weights.values())
        self.done: list[Round] = []
        self._steps, self._before, self._since = 0, 0.0, time.perf_counter()
        self._early: dict[str, Any] | None = self._now() if rewind == 0 else None
        masks = self._masks
        self._handles: list[Any] = [
            p.register_hook(lambda grad, name=name: grad * masks[name]) for name, p in self._weights.items()
        ]
        self._handles += [o.register_step_post_hook(self._after) for o in self.optimizers]

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
        return sum(int(mask.count_nonzero()) for mask in self._masks.values())

    def masks(self) -> dict[str, Tensor]:
        """By name: which weights are left."""
        return {name: mask.bool() for name, mask in self._masks.items()}

    def step(self) -> None:
        """Count an update."""
        self._steps += 1
        if self._early is None and self._steps == self.rewind:
            self._early = self._now()

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
        self._prune()
        for mask in self._masks.values():
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
        there, here = state["masks"], self._masks
        if {n: m.shape for n, m in there.items()} != {n: m.shape for n, m in here.items()}:
            raise ValueError(
                "LotteryTicket: the saved masks are for a model of other weights, or with other keep="
            )
        for name, mask in here.items():
            mask.copy_(there[name])
        self._early = _copied(state["early"])
        self.done = [Round(**r) for r in state["rounds"]]
        self._steps, self._before, self._since = state["steps"], state["seconds"], time.perf_counter()
        self._mask_weights()

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
        for name, p in self._weights.items():
            if not torch.isfinite(p.detach()).all():
                raise ValueError(f"{name}: it contains inf or NaN; nothing was pruned")

    @torch.no_grad()
    def _prune(self) -> None:
        parts = [[name] for name in self._weights] if self.scope == "layer" else [list(self._weights)]
        for names in parts:
            masks = [self._masks[name].flatten() for name in names]
            sizes = [self._weights[name].detach().abs().flatten() for name in names]
            mask, size = torch.cat(masks), torch.cat(sizes).float()
            left = int(mask.count_nonzero())
            size[mask == 0] = torch.inf
            mask[size.topk(round(self.fraction * left), largest=False).indices] = 0
            for name, part in zip(names, mask.split([len(m) for m in masks]), strict=True):
                self._masks[name].copy_(part.view_as(self._masks[name]))

    @torch.no_grad()
    def _rewind(self) -> None:
        assert self._early is not None
        for name, x in _tensors(self.model).items():
            x.copy_(self._early["model"][name])
        self._mask_weights()
        names = names_of(self.model)
        for optimizer, early in zip(self.optimizers, self._early["optimizers"], strict=True):
            load_optimizer(optimizer, names, _copied(early))
            for name, p in self._weights.items():
                for value in optimizer.state.get(p, {}).values():
                    if isinstance(value, Tensor) and value.shape == p.shape:
                        value.mul_(self._masks[name])
        for p in unwrap(self.model).parameters():
            p.grad = None

    def _now(self) -> dict[str, Any]:
        names = names_of(self.model)
        states = [optimizer_state(optimizer, names) for optimizer in self.optimizers]
        now: dict[str, Any] = _copied({"model": _tensors(self.model), "optimizers": states})
        return now

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._mask_weights()

    @torch.no_grad()
    def _mask_weights(self) -> None:
        torch._foreach_mul_(list(self._weights.values()), list(self._masks.values()))


def _prunable(model: nn.Module, keep: tuple[str, ...]) -> dict[str, nn.Parameter]:
    found = {own_name(n): p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
    kept = {pattern: fnmatch.filter(found, pattern) for pattern in keep}
    for pattern, names in kept.items():
        if not names:
            raise ValueError(f"LotteryTicket: keep={pattern!r} is none of " + ", ".join(found))
    found = {n: p for n, p in found.items() if not any(n in names for names in kept.values())}
    if not found:
        raise ValueError("LotteryTicket: the model has no weights of two dimensions or more to prune")
    return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and those buffers that are saved, by own name; the model's own, not copies."""
    return {own_name(name): x for name, x in unwrap(model).state_dict(keep_vars=True).items()}


def _copied(x: Any) -> Any:
    """A state of its own: nested dicts and lists, with tensors copied where they are."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: _copied(value) for key, value in x.items()}
    return [_copied(value) for value in x] if isinstance(x, list) else x
