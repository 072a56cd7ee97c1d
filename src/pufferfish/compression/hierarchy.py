"""`Machine`: workers of one machine send one compressed mean of their gradients to the other machines."""

import os
import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from .exchange import Group, Transport
from .meter import Meter


class Machine:
    """The workers of this machine (`inside`), and those with the same local number on all machines (`between`).

    The first worker of a machine exchanges the machine's means with those of the other machines, and gives the result
    to its own. It alone has error feedback and the method's state.

    Args:
        group: All workers (default: the whole job). torchrun started LOCAL_WORLD_SIZE of them on each machine, with
            consecutive ranks.
    """

    def __init__(self, group: dist.ProcessGroup | Transport | None) -> None:
        if isinstance(group, Transport):
            raise ValueError(f'hierarchy="node" needs process groups; {type(group).__name__} is flat')
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError('hierarchy="node" needs torch.distributed; start the job with torchrun')
        self.everyone = group or dist.group.WORLD
        world = dist.get_process_group_ranks(self.everyone)
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdigit() or int(text) < 1 or len(world) % int(text):
            raise ValueError(
                f'hierarchy="node": LOCAL_WORLD_SIZE is {text or "not set"}, which does not divide {len(world)} workers; '
                "start the job with torchrun, or set it to the number of workers on each machine"
            )
        local, rank, meter = int(text), dist.get_rank(group), Meter()
        machines = [world[i : i + local] for i in range(0, len(world), local)]
        mine, across = machines[rank // local], [machine[rank % local] for machine in machines]
        self.inside, self.between = (
            Group(dist.new_group(ranks, use_local_synchronization=True), meter) for ranks in (mine, across)
        )
        self.inside.inside = True
        self.worker, self.size = self.inside.worker, self.inside.size
        self.leads = self.worker == 0
        if self.between.size == 1 and self.size > 1 and self.leads:
            warnings.warn(
                f"hierarchy: all {self.size} workers are on one machine, so nothing is compressed; "
                'hierarchy="flat" compresses between them',
                stacklevel=3,
            )

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The machine's means, uncompressed."""
        means: dict[str, Tensor] = {}
        for some, flat in _flat(gradients):
            total = self.inside.sum(flat.div_(self.size))()  # divided first: a sum may overflow in 16 bits
            means.update(zip(some, _unflatten_dense_tensors(total, list(some.values())), strict=True))
        return means

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all workers of the machine the tensors of the first one, in place."""
        for some, flat in _flat(tensors):
            self.inside.meter.sent("broadcast", flat.nbytes, self.size, inside=True)
            with self.inside.meter.waiting():
                dist.broadcast(flat, group=self.inside.group, group_src=0)
            torch._foreach_copy_(list(some.values()), _unflatten_dense_tensors(flat, list(some.values())))


def _flat(tensors: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The tensors of each dtype, and a flat copy of them."""
    for dtype in sorted({x.dtype for x in tensors.values()}, key=str):
        some = {name: tensors[name] for name in sorted(tensors) if tensors[name].dtype == dtype}
        yield some, torch.cat([x.reshape(-1) for x in some.values()])
