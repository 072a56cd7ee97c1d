"""`ReplicaTransport`: the collectives of the replicas that are there now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from ...compression.exchange import Started, Transport, no_wait


class LostReplica(RuntimeError):
    """A collective has failed: a replica was lost, or the replicas differ. The round is tried again."""


class ReplicaTransport(Transport):
    """Collectives on a group of torchft, whose members change from round to round. An error raises `LostReplica`.

    Args:
        members: the process group, with the methods of `torch.distributed.ProcessGroup`.
    """

    def __init__(self, members: Any) -> None:
        super().__init__()
        self.members = members
        self.worker, self.size = 0, 1

    def move(self) -> None:
        """Read the size of the group, and the place of this replica in it, after a change."""
        try:
            group = self.members.parent
        except AssertionError as error:  # aborted, and not made anew
            raise LostReplica("the replicas have no group") from error
        self.worker, self.size = group.rank(), group.size()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the messages of all replicas, which have equal lengths. They are not metered."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        done, everyone = self._gather(own)
        done()
        return [bytes(x.numpy()) for x in everyone]

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        if self.size == 1:
            return no_wait, buffer
        return self._start(lambda: self.members.allreduce([buffer], AllreduceOptions())), buffer

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        if self.size == 1:
            return no_wait, [buffer]
        everyone = [torch.empty_like(buffer) for _ in range(self.size)]
        return self._start(lambda: self.members.allgather([everyone], [buffer], AllgatherOptions())), everyone

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        if self.size == 1:
            return no_wait, pieces
        n = len(pieces[self.worker])
        sent, received = torch.cat(pieces), pieces[0].new_empty(n * self.size)
        sizes = [n] * self.size, [len(piece) for piece in pieces]
        done = self._start(lambda: self.members.alltoall_base(received, sent, *sizes, AllToAllOptions()))
        return done, list(received.split(n)) if n else [received] * self.size

    @staticmethod
    def _start(collective: Callable[[], Any]) -> Callable[[], None]:
        """Start a collective and return a function that waits for it."""
        work = _without_traceback(collective)
        return lambda: _without_traceback(work.wait)


def _without_traceback(call: Callable[[], Any]) -> Any:
    """Return the result of a call. An error keeps no reference to the group, whose connections must be closed."""
    try:
        return call()
    except RuntimeError as error:
        message = str(error)
    raise LostReplica(message)
