"""`measure_layer`: time a layer dense and low-rank on the model's device and input shapes."""

import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from ..layers import meta_copy
from .profile import Call, autocast_context


def measure_layer(
    dense: nn.Module, low_rank: nn.Module, call: Call, graph: bool = False
) -> tuple[float, float]:
    """Measure forward + backward, dense and low-rank: median milliseconds on inputs of the example's shapes.

    The two alternate after a warm-up. They are copies: no gradient reaches the model. With `graph` a CUDA
    graph is replayed, which excludes the time to launch kernels.
    """
    device = next(dense.parameters()).device
    steps = [_step(layer, call, device) for layer in (dense, low_rank)]
    if graph:
        steps = [capture_cuda_graph(step) for step in steps]
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for step, samples in zip(steps, times, strict=True):
            timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
            samples.append(timer.blocked_autorange(min_run_time=0.03).median * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _step(layer: nn.Module, call: Call, device: torch.device) -> Callable[[], None]:
    generator = torch.Generator(device).manual_seed(0)

    def like(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # real values may be lengths or indices, so keep them
            return torch.zeros_like(x, device=device) if x.is_meta else x
        fresh = torch.empty_like(x, device=device, requires_grad=False)
        return fresh.normal_(generator=generator).requires_grad_(x.requires_grad)

    layer = meta_copy(layer).to_empty(device=device)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02, generator=generator)
    args, kwargs = pytree.tree_map_only(Tensor, like, (call.args, call.kwargs))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    with_gradient = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]

    def step() -> None:
        with autocast_context(call.autocast, device):
            output = layer(*args, **kwargs)
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            ones = [torch.ones_like(x) for x in leaves]
            torch.autograd.grad(leaves, with_gradient, cast(Any, ones), allow_unused=True)

    for _ in range(2):
        step()
    return step


def capture_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return the function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capturing requires a warm-up on a side stream
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
