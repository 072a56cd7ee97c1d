"""`Hierarchy`: machines and the workers inside each; only one copy of a gradient is sent between machines."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.shared_svd import balance
from ..distributed.workers import Workers
from .exchange import Group, Transport, reduce_scatter
from .meter import Meter
from .settings import HierarchyLike
from .state import Named


class Hierarchy:
    """The workers of this machine (`inside`), and those with the same local number on all machines (`between`).

    Every tensor has one owner in each machine: it receives the machine's mean (reduce-scatter), exchanges it with the
    tensor's owners on the other machines and sends the result to its machine (all-gather). Tensors stay whole, so that
    methods see what they always see; they are shared out by size.
    """

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        meter = Meter()
        self.inside, self.between = Group(inside, meter), Group(between, meter)
        self.inside.inside = True
        self.worker, self.size = self.inside.worker, self.inside.size

    def owners(self, gradients: Mapping[str, Tensor]) -> list[list[str]]:
        """Names of the tensors that each worker of a machine owns."""
        owned: list[list[str]] = [[] for _ in range(self.size)]
        for names in _by_dtype(gradients).values():
            shares = balance([gradients[n].numel() for n in names], self.size)
            for name, owner in zip(names, shares, strict=True):
                owned[owner].append(name)
        return owned

    def average_inside(
        self, owners: Sequence[Sequence[str]], gradients: Mapping[str, Tensor], bad: Tensor
    ) -> dict[str, Tensor]:
        """The machine's means of the tensors that this worker owns. If its own gradients are `bad`, it adds zeros."""
        mine: dict[str, Tensor] = {}
        for shares in _shares(owners, gradients):
            s = max(sum(gradients[n].numel() for n in names) for names in shares)
            first = next(gradients[n] for names in shares for n in names)
            flat = first.new_zeros(self.size, s)
            for row, names in zip(flat, shares, strict=True):
                if names:  # with fewer tensors than workers, some own none
                    torch._foreach_copy_(_views(row, names, gradients), [gradients[n] for n in names])
            if bad.device.type != "cpu" or bad:
                flat.masked_fill_(bad, 0)
            flat /= self.size  # before the sum, which may overflow in 16 bits
            names = shares[self.worker]
            mine |= dict(zip(names, _views(self._reduce_scatter(flat), names, gradients), strict=True))
        return mine

    def _reduce_scatter(self, flat: Tensor) -> Tensor:
        """Sum of the machine's workers, of this worker's row of `flat`."""
        row = torch.empty_like(flat[0])
        self.inside.meter.sent("reduce_scatter", flat.nbytes, self.size, inside=True)
        with self.inside.meter.waiting():
            reduce_scatter(row, flat.view(-1), group=self.inside.group)
        return row

    def share_inside(
        self, owners: Sequence[Sequence[str]], means: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All tensors, from their owners in this machine."""
        everything: dict[str, Tensor] = {}
        for shares in _shares(owners, like):
            s = max(sum(like[n].numel() for n in names) for names in shares)
            row = next(like[n] for names in shares for n in names).new_zeros(s)
            names = shares[self.worker]
            if names:
                torch._foreach_copy_(_views(row, names, like), [means[n] for n in names])
            for theirs, their_row in zip(shares, self.inside.gather(row)(), strict=True):
                everything |= dict(zip(theirs, _views(their_row, theirs, like), strict=True))
        return everything

    def move_state(
        self,
        named: Named,
        methods: dict[str, Any],
        before: Sequence[Sequence[str]],
        after: Sequence[Sequence[str]],
        device: torch.device,
    ) -> None:
        """Send error feedback and the method's state to the new owner where a tensor's owner changes.

        Args:
            named: State of this worker, by name; tensors that it receives are added.
            methods: What the state belongs to, as in `State.methods`; those of received tensors are added.
            before: Names of the tensors that each worker of a machine owned.
            after: Those that it owns now.
        """
        was, now = (
            {name: owner for owner, names in enumerate(owners) for name in names}
            for owners in (before, after)
        )
        moved = sorted(name for name in was.keys() & now.keys() if was[name] != now[name])
        if not moved:
            return
        workers = Workers(self.inside.group, device, "compression")

        def layouts() -> dict[str, Any]:
            """Method, and shape and dtype of each tensor, which only the old owner knows."""
            mine = {name: named.get(name, {}) for name in moved if was[name] == self.worker}
            return {
                name: [methods.get(name), {k: _layout(x) for k, x in xs.items()}] for name, xs in mine.items()
            }

        everyone = workers.gather(layouts)
        for name in moved:
            method, tensors = everyone[was[name]][name]
            for key, (shape, dtype) in tensors.items():
                if was[name] == self.worker:
                    x = named[name][key].contiguous()
                else:
                    x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                workers.broadcast_tensor(x, was[name])
                if now[name] == self.worker:
                    named.setdefault(name, {})[key] = x
            if now[name] == self.worker and method is not None:
                methods[name] = method


def make_hierarchy(chosen: HierarchyLike, group: dist.ProcessGroup | Transport | None) -> Hierarchy | None:
    """The hierarchy that `Settings.hierarchy` chooses; None for a flat one."""
    if chosen == "flat":
        return None
    if isinstance(group, Transport):
        raise ValueError(f"hierarchy={chosen!r} needs process groups; {type(group).__name__} is flat")
    hierarchy = machines_of(group) if isinstance(chosen, str) else Hierarchy(*chosen)
    if hierarchy.between.size == 1 and hierarchy.size > 1 and hierarchy.worker == 0:
        warnings.warn(
            f"hierarchy: all {hierarchy.size} workers are on one machine, so nothing is compressed; "
            'hierarchy="flat" compresses between them',
            stacklevel=3,
        )
    return hierarchy


def machines_of(group: dist.ProcessGroup | None) -> Hierarchy:
    """The machines of a job that torchrun started: LOCAL_WORLD_SIZE workers on each, with consecutive ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError('hierarchy="node" needs torch.distributed; start the job with torchrun')
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    world = dist.get_process_group_ranks(group or dist.group.WORLD)
    if not text:
        raise ValueError(
            'hierarchy="node": LOCAL_WORLD_SIZE is not set; start the job with torchrun, or pass two groups: '
            "hierarchy=(inside, between)"
        )
    if not text.isdigit() or int(text) < 1 or len(world) % int(text):
        raise ValueError(
            f'hierarchy="node": LOCAL_WORLD_SIZE={text} does not divide {len(world)} workers; '
            "start the job with torchrun, or pass two groups: hierarchy=(inside, between)"
        )
    local, rank = int(text), dist.get_rank(group)
    machines = [world[i : i + local] for i in range(0, len(world), local)]
    mine = machines[rank // local]
    across = [machine[rank % local] for machine in machines]
    return Hierarchy(*(dist.new_group(ranks, use_local_synchronization=True) for ranks in (mine, across)))


def _layout(x: Tensor) -> list[Any]:
    return [list(x.shape), str(x.dtype).removeprefix("torch.")]


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    names: dict[torch.dtype, list[str]] = {}
    for name in sorted(tensors):
        names.setdefault(tensors[name].dtype, []).append(name)
    return names


def _shares(owners: Sequence[Sequence[str]], like: Mapping[str, Tensor]) -> list[list[list[str]]]:
    """For each dtype, the names of each owner's tensors."""
    dtypes = _by_dtype(like)
    return [[[n for n in theirs if like[n].dtype == dtype] for theirs in owners] for dtype in dtypes]


def _views(row: Tensor, names: Sequence[str], like: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of a flat row, one tensor after the other."""
    sizes = [like[n].numel() for n in names]
    pieces = row[: sum(sizes)].split(sizes) if sizes else ()
    return [piece.view(like[n].shape) for n, piece in zip(names, pieces, strict=True)]
