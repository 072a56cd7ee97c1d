"""`Graph`: work on batches of one shape, whose kernels are recorded once and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Calls before the recording: libraries make themselves ready, optimizers their state. They do real work.
WARM_UP = 3


class Graph:
    """Calls `work(inputs, kept)`: at first as it is, then by a CUDA graph, which launches all its kernels at once.

    Made for one CUDA device. Shapes stay; `work` neither waits for the device nor decides anything by what it holds.

    Args:
        work: gets tensors that are new in every call, and tensors that it changes and that go on into the next.
        optimizer: that `work` steps, if any: its learning rates are read at every call.
        generators: beside the default one, what `work` draws random numbers from.
    """

    def __init__(
        self,
        work: Callable[[list[Tensor], list[Tensor]], Any],
        optimizer: torch.optim.Optimizer | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._work, self._optimizer, self._generators = work, optimizer, generators
        self._calls = 0
        self._aside = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Sequence[Tensor], kept: Sequence[Tensor] = ()) -> Any:
        """What `work` returns; from the recording on always the same tensors, with new values."""
        if self._calls < WARM_UP:
            self._calls += 1
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                found = self._work(list(inputs), list(kept))
            torch.cuda.current_stream().wait_stream(self._aside)
            return found
        if self._graph is None:
            self._record(inputs, kept)
        assert self._graph is not None
        for x, new in zip((*self._inputs, *self._kept), (*inputs, *kept), strict=True):
            x.copy_(new)
        for rate, group in zip(self._rates, self._groups, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()
        for x, new in zip(kept, self._kept, strict=True):
            x.copy_(new)
        return self._found

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Of today: loading a state replaces them."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _record(self, inputs: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._inputs, self._kept = [x.clone() for x in inputs], [x.clone() for x in kept]
        numbers = [group["lr"] for group in self._groups]
        self._rates = [torch.tensor(float(x), device=inputs[0].device) for x in numbers]
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate  # else the number of today would be recorded
        try:
            with torch.cuda.graph(graph):
                self._found = self._work(self._inputs, self._kept)
        finally:
            for group, number in zip(self._groups, numbers, strict=True):
                group["lr"] = number
        self._graph = graph
