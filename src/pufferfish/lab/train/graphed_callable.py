"""`GraphedCallable`: a function on tensors of fixed shapes, captured in a CUDA graph and replayed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...planning.timing import undo_failed_capture

#: Eager calls before the capture, in which libraries and optimizers create their state. They do real work.
WARM_UP = 3


class GraphedCallable:
    """Calls `function(inputs, carried)`, from the fourth call on by replaying a CUDA graph.

    A call with other shapes than those of the capture runs eagerly. `function` must neither synchronize the device nor branch on values of tensors.

    Args:
        function: gets tensors that are new in every call, and tensors that it updates in place for the next call.
        optimizer: that `function` steps, if any; its learning rates are read at every call.
        generators: CUDA generators that `function` draws from, beside the default one.
    """

    def __init__(
        self,
        function: Callable[[list[Tensor], list[Tensor]], Any],
        optimizer: torch.optim.Optimizer | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function, self._optimizer, self._generators = function, optimizer, generators
        self._calls = 0
        self._side_stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> Any:
        """Return what `function` returns; after the capture always the same tensors, with new values."""
        if self._calls < WARM_UP:
            self._calls += 1
            self._side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side_stream):
                result = self._function(list(inputs), list(carried))
            torch.cuda.current_stream().wait_stream(self._side_stream)
            return result
        if self._graph is None:
            self._capture(inputs, carried)
        assert self._graph is not None
        if any(x.shape != new.shape for x, new in zip(self._inputs, inputs, strict=True)):
            return self._function(list(inputs), list(carried))
        for x, new in zip((*self._inputs, *self._carried), (*inputs, *carried), strict=True):
            x.copy_(new)
        for rate, group in zip(self._rates, self._groups, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()
        for x, new in zip(carried, self._carried, strict=True):
            x.copy_(new)
        return self._result

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Current parameter groups; loading a state_dict replaces them."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _capture(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> None:
        self._inputs, self._carried = [x.clone() for x in inputs], [x.clone() for x in carried]
        numbers = [group["lr"] for group in self._groups]
        self._rates = [torch.tensor(float(x), device=inputs[0].device) for x in numbers]
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate  # a number would be captured as a constant
        try:
            with undo_failed_capture(graph, self._generators), torch.cuda.graph(graph):
                self._result = self._function(self._inputs, self._carried)
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(f"no CUDA graph can capture an update: {line}; use --mode auto") from error
        finally:
            for group, number in zip(self._groups, numbers, strict=True):
                group["lr"] = number
        self._graph = graph
