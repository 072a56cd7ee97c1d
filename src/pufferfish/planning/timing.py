"""`measure_layer` and `measure_step`: time a layer, dense and low-rank, and a step of the model on its device."""

import contextlib
import statistics
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from ..layers import meta_copy
from ..layers.names import unwrap
from .private_copy import private_copy
from .profile import Call, Example, autocast_context, run_example

#: How a job runs its steps: eager PyTorch, `torch.compile`, or a captured CUDA graph.
Mode = Literal["eager", "compile", "graph"]
Step = Callable[[], Any]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def measure_layer(
    dense: nn.Module, low_rank: nn.Module, call: Call, mode: Mode = "eager"
) -> tuple[float, float]:
    """Measure forward + backward, dense and low-rank: median milliseconds on inputs of the example's shapes.

    The two alternate after a warm-up. They are copies: no gradient reaches the model.

    Args:
        mode: "graph" replays a CUDA graph, which excludes the time to launch kernels. "compile" compiles the layers, and
            on CUDA replays a graph of them too.
    """
    device = next(dense.parameters()).device
    for weight in dense.parameters():
        order = _FORMATS.get(weight.dim(), torch.contiguous_format)
        if not weight.is_contiguous() and weight.is_contiguous(memory_format=order):
            low_rank.to(memory_format=order)  # type: ignore[call-overload]  # as `factorize_` does
    with _on(device):
        steps = [
            _in_mode(_layer_step(layer, call, device, mode), device, mode) for layer in (dense, low_rank)
        ]
        times: list[list[float]] = [[], []]
        for _ in range(3):
            for step, samples in zip(steps, times, strict=True):
                samples.append(_milliseconds(step, 0.03))
    return statistics.median(times[0]), statistics.median(times[1])


def measure_step(model: nn.Module, example: Example, mode: Mode = "eager") -> float:
    """Measure forward + backward of a whole model on the example, in milliseconds.

    A copy runs: the model, its gradients and the example do not change.
    """
    model = private_copy(unwrap(model))
    device = next(model.parameters()).device
    example = cast(Example, pytree.tree_map_only(Tensor, lambda x: _to_device(x, device), example))
    parameters = [p for p in model.parameters() if p.requires_grad]
    forward = _compiled(lambda: run_example(model, example), mode)
    with _on(device), torch.enable_grad():
        milliseconds = _milliseconds(_in_mode(lambda: _backward(forward(), parameters), device, mode), 0.2)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the activations of a whole step have reserved
    return milliseconds


def _layer_step(layer: nn.Module, call: Call, device: torch.device, mode: Mode) -> Step:
    generator = torch.Generator(device).manual_seed(0)

    def like(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # real values may be lengths or indices, so keep them
            return _to_device(x, device) if x.is_meta else x
        fresh = torch.empty_like(x, device=device, requires_grad=False)
        return fresh.normal_(generator=generator).requires_grad_(x.requires_grad)

    layer = meta_copy(layer).to_empty(device=device)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02, generator=generator)
    args, kwargs = pytree.tree_map_only(Tensor, like, (call.args, call.kwargs))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    with_gradient = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    forward = _compiled(lambda: layer(*args, **kwargs), mode)

    def step() -> None:
        with autocast_context(call.autocast, device):
            output = forward()
        _backward(output, with_gradient)

    return step


def _backward(output: Any, with_gradient: Sequence[Tensor]) -> None:
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if leaves:
        ones = [torch.ones_like(x) for x in leaves]
        torch.autograd.grad(leaves, with_gradient, cast(Any, ones), allow_unused=True)
    torch.clear_autocast_cache()  # each step of a training loop casts the weights again


def _compiled(forward: Step, mode: Mode) -> Step:
    if mode != "compile":
        return forward
    # torch compiles one code object a limited number of times, so every layer gets one of its own.
    own = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )
    return torch.compile(own, dynamic=False)


def _in_mode(step: Step, device: torch.device, mode: Mode) -> Step:
    """The step after a warm-up, captured where the mode asks for it."""
    for _ in range(2):
        step()
    return step if mode == "eager" or device.type != "cuda" else capture_cuda_graph(step)


def _milliseconds(step: Step, min_seconds: float) -> float:
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_seconds).median * 1e3


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    if not x.is_meta:
        return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)
    fresh = torch.zeros_like(x, device=device, requires_grad=False)
    return fresh.normal_().requires_grad_(x.requires_grad) if x.is_floating_point() else fresh


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def capture_cuda_graph(step: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return the function that replays it.

    Args:
        pool: memory that several graphs share, from `torch.cuda.graph_pool_handle`; None: memory of its own.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capturing requires a warm-up on a side stream
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()

    def replay(step: Callable[[], None] = step) -> None:  # keeps alive the tensors that the graph reads
        graph.replay()

    return replay
