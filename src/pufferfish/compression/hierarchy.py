"""`Nodes`: a job of two levels, machines and the workers in each, between which only one copy of a gradient travels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.workers import balanced
from .batch import Batch
from .meter import Meter
from .store import MEMORY, Store
from .transport import Group, Transport, reduce_scatter


class Nodes:
    """The workers of this machine (`inside`), and those of the same place on all machines (`between`).

    Every tensor has one owner in each machine: it gets the machine's mean (reduce-scatter), exchanges it with
    the tensor's owners on the other machines, and gives the result to its machine (all-gather). Tensors stay
    whole, so that methods see what they always see; they are shared out by size.
    """

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        meter = Meter()
        self.inside, self.between = Group(inside, meter), Group(between, meter)
        self.inside.inside = True
        self.rank, self.size = self.inside.ranks[0], self.inside.size

    def owners(self, like: Mapping[str, Tensor]) -> list[list[str]]:
        """Which tensors each worker of a machine owns."""
        found: list[list[str]] = [[] for _ in range(self.size)]
        for names in _by_dtype(like).values():
            for name, owner in zip(names, balanced([like[n].numel() for n in names], self.size), strict=True):
                found[owner].append(name)
        return found

    def down(
        self, owners: Sequence[Sequence[str]], gradients: Mapping[str, Tensor], bad: Tensor
    ) -> dict[str, Tensor]:
        """The machine's means of the tensors that are ours. If ours are `bad`, zeros count in their place."""
        mine: dict[str, Tensor] = {}
        for shares in _shares(owners, gradients):
            s = max(sum(gradients[n].numel() for n in names) for names in shares)
            first = next(gradients[n] for names in shares for n in names)
            flat = first.new_zeros(self.size, s)
            for row, names in zip(flat, shares, strict=True):
                torch._foreach_copy_(_views(row, names, gradients), [gradients[n] for n in names])
            if bad.device.type != "cpu" or bad:
                flat.masked_fill_(bad, 0)
            flat /= self.size  # before the sum, which may overflow in 16 bits
            names = shares[self.rank]
            mine |= dict(zip(names, _views(self._own_row(flat), names, gradients), strict=True))
        return mine

    def _own_row(self, flat: Tensor) -> Tensor:
        """The sum of the machine's workers, of the row that is ours."""
        row = torch.empty_like(flat[0])
        self.inside.meter.count("reduce_scatter", flat.nbytes, self.size, inside=True)
        with self.inside.meter.exchange():
            reduce_scatter(row, flat.view(-1), group=self.inside.group)
        return row

    def up(
        self, owners: Sequence[Sequence[str]], means: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All tensors, from their owners."""
        everything: dict[str, Tensor] = {}
        for shares in _shares(owners, like):
            s = max(sum(like[n].numel() for n in names) for names in shares)
            row = next(like[n] for names in shares for n in names).new_zeros(s)
            names = shares[self.rank]
            torch._foreach_copy_(_views(row, names, like), [means[n] for n in names])
            (rows,) = self.inside.gather([row])()
            for theirs, row in zip(shares, rows, strict=True):
                everything |= dict(zip(theirs, _views(row, theirs, like), strict=True))
        return everything


#: "flat", "node", or the groups inside a machine and between machines.
#: A user says one of the first three; `Nodes` is for who has none to talk to, such as a dry run.
Levels = Literal["flat", "node"] | tuple[dist.ProcessGroup, dist.ProcessGroup] | Nodes


def hand_over(
    nodes: Nodes,
    store: Store,
    before: Sequence[Sequence[Batch]],
    after: Sequence[Sequence[Batch]],
    device: torch.device,
) -> None:
    """Memories go along where a tensor gets another owner in its machine. `before` and `after`: what each owns."""
    named, methods = store.named(), store.methods()
    was = {
        name: (owner, shape)
        for owner, part in enumerate(before)
        for batch in part
        if batch.memory
        for name, shape in zip(batch.names, batch.shapes, strict=True)
    }
    now = {name: owner for owner, part in enumerate(after) for batch in part for name in batch.names}
    for name in sorted(name for name in was.keys() & now.keys() if was[name][0] != now[name]):
        owner, shape = was[name]
        x = named.get(name, {}).get(MEMORY, torch.zeros(shape, device=device)).contiguous()
        dist.broadcast(x, group=nodes.inside.group, group_src=owner)
        if nodes.rank == now[name]:
            named.setdefault(name, {})[MEMORY] = x
    store.load(named, methods)


def chosen(levels: Levels, group: dist.ProcessGroup | Transport | None) -> Nodes | None:
    """What `levels` asks for; None for one level."""
    if isinstance(levels, Nodes):
        return levels
    if levels == "flat":
        return None
    if isinstance(group, Transport):
        raise ValueError(f"levels={levels!r} is for process groups; {type(group).__name__} has one level")
    if levels != "node" and not (isinstance(levels, tuple) and len(levels) == 2):
        raise ValueError(f'levels={levels!r} is neither "flat" nor "node" nor two groups: (inside, between)')
    found = nodes(group) if isinstance(levels, str) else Nodes(*levels)
    if found.between.size == 1 and found.size > 1 and found.rank == 0:
        warnings.warn(
            f"levels: all {found.size} workers are on one machine, so nothing is compressed; "
            'levels="flat" compresses between them',
            stacklevel=3,
        )
    return found


def nodes(group: dist.ProcessGroup | None) -> Nodes:
    """The machines of a job that torchrun started: LOCAL_WORLD_SIZE workers on each, with consecutive ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError('levels="node" needs torch.distributed; start the job with torchrun')
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    world = dist.get_process_group_ranks(group or dist.group.WORLD)
    if not text:
        raise ValueError(
            'levels="node": LOCAL_WORLD_SIZE is not set; start the job with torchrun, or give two groups: '
            "levels=(inside, between)"
        )
    if not text.isdigit() or int(text) < 1 or len(world) % int(text):
        raise ValueError(
            f'levels="node": LOCAL_WORLD_SIZE={text} workers a machine do not make {len(world)} workers; '
            "start the job with torchrun, or give two groups: levels=(inside, between)"
        )
    local, rank = int(text), dist.get_rank(group)
    machines = [world[i : i + local] for i in range(0, len(world), local)]
    mine = machines[rank // local]
    across = [machine[rank % local] for machine in machines]
    return Nodes(*(dist.new_group(ranks, use_local_synchronization=True) for ranks in (mine, across)))


def _by_dtype(like: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    found: dict[torch.dtype, list[str]] = {}
    for name in sorted(like):
        found.setdefault(like[name].dtype, []).append(name)
    return found


def _shares(owners: Sequence[Sequence[str]], like: Mapping[str, Tensor]) -> list[list[list[str]]]:
    """For each dtype, the names of each owner's tensors."""
    dtypes = _by_dtype(like)
    return [[[n for n in theirs if like[n].dtype == dtype] for theirs in owners] for dtype in dtypes]


def _views(row: Tensor, names: Sequence[str], like: Mapping[str, Tensor]) -> list[Tensor]:
    """Places for tensors, one after the other."""
    sizes = [like[n].numel() for n in names]
    pieces = row[: sum(sizes)].split(sizes) if sizes else ()
    return [piece.view(like[n].shape) for n, piece in zip(names, pieces, strict=True)]
