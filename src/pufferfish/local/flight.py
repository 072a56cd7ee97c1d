"""`Flight`: an average that is computed and exchanged while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Means over the workers by name.
Means = dict[str, Tensor]


class Flight:
    """One average on its way to the workers.

    Flights run one after the other, each in a thread: a method may need several messages, and the next one depends on
    the answer to the last. All workers send their flights in the same order.

    Args:
        remaining: number of updates until it is applied.
        means: the result, if it is known already.

    Attributes:
        remaining: counted down by the caller.

    >>> flight = Flight.send(lambda: {"w": torch.ones(2)}, remaining=3)
    >>> flight.wait(), flight.remaining
    ({'w': tensor([1., 1.])}, 3)
    """

    def __init__(self, remaining: int, means: Means | None = None) -> None:
        self.remaining = remaining
        self._means = means
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def send(
        cls,
        average: Callable[[], Means],
        remaining: int,
        *,
        after: Flight | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> Flight:
        """Start `average` in a thread.

        Args:
            after: begin when this flight has ended.
            stream: GPU stream of the work. It waits for what the current stream has been given so far.
        """
        flight = cls(remaining)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # A daemon: after an error elsewhere, the process does not wait for workers that are gone.
        flight._thread = threading.Thread(
            target=flight._run, args=(average, after, stream), name="LocalSteps flight", daemon=True
        )
        flight._thread.start()
        return flight

    def wait(self) -> Means:
        """Return the result once it is there; raise the error that ended the flight."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._means is not None
        for x in self._means.values():
            if x.is_cuda:  # allocated on the stream of the flight, which must not reuse the memory too early
                x.record_stream(torch.cuda.current_stream(x.device))
        return self._means

    def state_dict(self) -> dict[str, Any]:
        """Wait for the result and return it, with the number of updates until it is applied."""
        return {"means": dict(self.wait()), "remaining": self.remaining}

    def _run(
        self, average: Callable[[], Means], after: Flight | None, stream: torch.cuda.Stream | None
    ) -> None:
        if after is not None and after._thread is not None:
            after._thread.join()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._means = average()
            if stream is not None:
                stream.synchronize()  # in this thread, before the inputs are freed
        except BaseException as error:  # raised by `wait`
            self._error = error


def separate_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Create a second group of the same workers, so that flights never meet other messages. All of them call it."""
    if group is None or dist.get_world_size(group) == 1:
        return group
    kinds = group._device_types
    timeout = group._get_backend(kinds[0]).options._timeout
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    second: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return second
