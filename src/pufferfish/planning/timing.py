"""Time the layers that a plan changes, dense and low-rank, and a step of the model, on its device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from ..layers import low_rank_type, meta_copy, unwrap
from .entries import Entry, Plan
from .profile import Call, Example, Profile, autocast_context, private_copy, run_example
from .rules import align
from .text import progress, track

T = TypeVar("T")
#: How a job runs its steps: eager PyTorch, `torch.compile`, or a captured CUDA graph.
Mode = Literal["eager", "compile", "graph"]
Step = Callable[[], Any]
Times = tuple[float, float]  # milliseconds in one step, dense and low-rank

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Timing:
    """How `pufferfish.plan` measures layers.

    >>> Timing("compile", link=50e6)
    Timing(mode='compile', link=50000000.0)
    """

    mode: Mode = "eager"  # in which the job runs
    #: Bytes of gradients per second that the workers average, such as `Link.all_reduce_rate`. A layer then becomes low-rank
    #: if that shortens its measured time plus the time to send its gradients. None: bytes do not count.
    link: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f'measure={self.mode!r} is not "eager", "compile", "graph", True, False or None')
        if self.link is not None and not 0 < self.link < float("inf"):
            raise ValueError(f"link={self.link!r} is not a number of bytes per second above 0")


def as_timing(
    measure: Timing | Mode | bool | None, model: nn.Module, example: Example | None
) -> Timing | None:
    """How layers are measured; None: they are not."""
    if measure is None:
        return Timing() if example is not None and _on_cuda(model) and not _several_workers() else None
    if measure is False:
        return None
    timing = measure if isinstance(measure, Timing) else Timing("eager" if measure is True else measure)
    if example is None:
        raise ValueError(f"measure={measure!r} needs example=, a batch with the shapes that the layers see")
    if timing.mode == "graph" and not _on_cuda(model):
        raise ValueError('measure="graph" times CUDA graphs: move the model to a CUDA device')
    return timing


def _on_cuda(model: nn.Module) -> bool:
    return {p.device.type for p in model.parameters()} == {"cuda"}


def _several_workers() -> bool:
    """Whether this is a worker of several, in a process group or before it is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return os.environ.get("WORLD_SIZE", "1") != "1"


def with_measured_times(
    plan: Plan,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    profiled: Profile,
    example: Example,
    timing: Timing,
) -> Plan:
    """Measure each layer that would change and keep those dense whose low-rank form does not shorten a step.

    One dense step of the whole model is measured too, for what the plan expects.

    Args:
        modules: the model's layers by name.
    """
    mode, link = timing.mode, timing.link
    device = next(model.parameters()).device
    ranks = {layer: r for layer, r in _ranks(plan).items() if layer in profiled.calls}
    entries: dict[str, Entry] = {}
    known: dict[str, Times | None] = {}  # equal layers are measured once
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.is_cuda}):
        for layer in track(ranks, "measuring layers"):
            dense, call = modules[layer], profiled.calls[layer]
            key = _what_is_measured(dense, ranks[layer], call)
            if key not in known:
                kind = low_rank_type(type(dense))
                assert kind is not None
                measure = partial(measure_layer, dense, kind(dense, ranks[layer]), call)
                known[key] = _measured(layer, measure, mode)
            if (times := known[key]) is not None:
                group = [e for e in plan.entries if e.layer == layer]
                ms = times[0] * call.count, times[1] * call.count
                entries |= {e.name: e for e in _decide(group, ranks[layer], ms, link)}
        if not entries:
            return plan
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        measured: dict[str, Any] = {"device": name, "mode": mode} | ({} if link is None else {"link": link})
        if not _waits_for_others(model):
            with progress("measuring a step", None):
                step = _measured("the whole step", partial(measure_step, model, example), mode)
            measured |= {} if step is None else {"step_ms": step}
    return dataclasses.replace(
        plan, entries=tuple(entries.get(e.name, e) for e in plan.entries), measured=measured
    )


def _ranks(plan: Plan) -> dict[str, dict[str, int]]:
    """Ranks to measure: layer → matrix → rank."""
    ranks: dict[str, dict[str, int]] = {}
    for e in plan.entries:
        if e.matrix is not None and (e.rank or e.rule):
            # A rule that needs the weights has no rank yet; time a quarter of the full rank instead.
            quarter = align(e.matrix.full_rank // 4, e.matrix, e.rule.multiple if e.rule else 1)
            ranks.setdefault(e.layer, {})[e.matrix.name] = e.rank or quarter
    return ranks


def _what_is_measured(dense: nn.Module, ranks: Mapping[str, int], call: Call) -> str:
    """The same text for layers that take the same time."""
    kind = type(dense).__module__, type(dense).__qualname__, dense.training
    weights = [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in dense.parameters()]
    inputs = [
        (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
        for x in pytree.tree_leaves((call.args, call.kwargs))
    ]
    return repr((dense, kind, weights, ranks, inputs, call.autocast))


def _measured(name: str, measure: Callable[[Mode], T], mode: Mode) -> T | None:
    """What `measure` returns; None, with a warning, where it raises in eager mode. There, nobody need have asked for it."""
    try:
        return measure(mode)
    except Exception as error:  # a layer that runs alone may raise anything
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        text = f"{name}: cannot be measured in mode {mode!r} ({text})"
        if mode != "eager":
            raise RuntimeError(f'{text}; give measure="eager", or keep the layer dense with keep=') from error
        warnings.warn(text, stacklevel=4)
        return None


def _decide(group: Sequence[Entry], ranks: Mapping[str, int], ms: Times, link: float | None) -> list[Entry]:
    """Entries of a layer with its times; dense if low rank takes longer than it saves in sending."""
    saved_bytes = sum(
        e.itemsize * (e.before - e.matrix.factor_numel(ranks[e.matrix.name]))
        for e in group
        if e.matrix is not None and e.trainable and (e.rank or e.rule)
    )
    less_to_send = 1e3 * saved_bytes / link if link else 0.0
    reason = f"slower when measured: {ms[0]:.3g} ms dense, {ms[1]:.3g} ms low-rank"
    reason += f", {less_to_send:.3g} ms less to send" if link else ""
    decided = []
    for e in group:
        timed = dataclasses.replace(e, ms=ms)
        slower = (e.rank or e.rule) and ms[1] - less_to_send >= ms[0]
        decided.append(timed.keep_dense(reason) if slower else timed)
    return decided


def _waits_for_others(model: nn.Module) -> bool:
    """Whether a layer may wait for other workers, which need not measure as many steps."""
    return _several_workers() or any(type(p) not in (Tensor, nn.Parameter) for p in model.parameters())


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


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    if not x.is_meta:
        return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)
    fresh = torch.zeros_like(x, device=device, requires_grad=False)
    return fresh.normal_().requires_grad_(x.requires_grad) if x.is_floating_point() else fresh


def _compiled(forward: Step, mode: Mode) -> Step:
    if mode != "compile":
        return forward
    # torch compiles one code object a limited number of times, so every layer gets one of its own.
    own = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )
    return torch.compile(own, dynamic=False)


def _backward(output: Any, with_gradient: Sequence[Tensor]) -> None:
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if leaves:
        ones = [torch.ones_like(x) for x in leaves]
        torch.autograd.grad(leaves, with_gradient, cast(Any, ones), allow_unused=True)
    torch.clear_autocast_cache()  # each step of a training loop casts the weights again


def _in_mode(step: Step, device: torch.device, mode: Mode) -> Step:
    """The step after a warm-up, captured where the mode asks for it."""
    for _ in range(2):
        step()
    return step if mode == "eager" or device.type != "cuda" else capture_cuda_graph(step)


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


def _milliseconds(step: Step, min_seconds: float) -> float:
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_seconds).median * 1e3


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
