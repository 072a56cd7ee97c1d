"""What a model and its layers cost: parameters, MACs, bytes on the wire, memory, measured milliseconds."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from .layers import LowRank, Matrix, hollow, low_rank_type
from .names import named_modules, unwrap

#: One batch: a tensor, positional arguments, keyword arguments, or a function that runs the model.
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A whole model's cost for one training step."""

    parameters: int
    parameter_bytes: int
    trainable: int
    gradient_bytes: int
    forward_macs: int | None = None  # None: no example was given
    backward_macs: int | None = None

    def memory(self, states: int) -> int:
        """Bytes of weights, gradients and `states` optimizer tensors a parameter (SGD 1, Adam 2)."""
        return self.parameter_bytes + (1 + states) * self.gradient_bytes

    def wire_bytes(self, engine: str = "ddp", *, shards: int = 1) -> int:
        """Bytes a rank hands to collectives in one step.

        `ddp` all-reduces the gradients. `fsdp2` gathers the parameters twice and reduce-scatters the
        gradients. `hsdp` does the same inside each of the groups of `shards` ranks and all-reduces each
        gradient shard between them.

        >>> step = totals(nn.Linear(1000, 1000, bias=False))
        >>> [step.wire_bytes(engine, shards=4) for engine in ("ddp", "fsdp2", "hsdp")]
        [4000000, 12000000, 13000000]
        """
        sharded = 2 * self.parameter_bytes + self.gradient_bytes
        match engine:
            case "ddp":
                return self.gradient_bytes
            case "fsdp2":
                return sharded
            case "hsdp":
                return sharded + self.gradient_bytes // shards
        raise ValueError(f"engine {engine!r} is not one of ddp, fsdp2, hsdp")


def totals(model: nn.Module, profile: Profile | None = None) -> Totals:
    """Count a model's parameters; with a `Profile` its MACs too."""
    parameters = [p for p in unwrap(model).parameters() if not is_lazy(p)]
    trainable = [p for p in parameters if p.requires_grad]
    return Totals(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        forward_macs=profile.forward_macs if profile else None,
        backward_macs=profile.backward_macs if profile else None,
    )


@dataclass
class Call:
    """How a layer was called in the example."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Counter[str]  # by matrix: the vectors it was multiplied with, all calls together
    grad_positions: Counter[str]  # those of them that backward wants the gradient of


@dataclass
class Profile:
    """The MACs of one step on the example, and how each layer was called in it."""

    forward_macs: int = 0
    backward_macs: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    functional: dict[str, int] = field(default_factory=dict)  # MACs outside layers a plan could change


def profile(model: nn.Module, example: Example) -> Profile:
    """Run one forward and backward and count.

    The run happens on a copy without storage (meta tensors): no arithmetic, no memory, and the model, its
    gradients, its batch statistics and the random state are untouched. Where a model needs real values
    (data-dependent branches, packed sequences) a real copy runs instead.
    """
    model = unwrap(model)
    if not callable(example):
        # An operator without a meta kernel or a look at values may fail in any way; whatever is really
        # wrong fails again below.
        with contextlib.suppress(Exception):
            return _profile(hollow(model), _copies(example, torch.device("meta")))
        example = _copies(example, None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _profile(_private_copy(model), example)


def _copies(example: Example, device: torch.device | None) -> Example:
    """The example on fresh tensors, so that nothing the model does reaches the user's."""

    def fresh(x: Tensor) -> Tensor:
        return x.detach().clone().to(device or x.device).requires_grad_(x.requires_grad)

    return cast(Example, pytree.tree_map_only(Tensor, fresh, example))


def _private_copy(model: nn.Module) -> nn.Module:
    """A copy whose runs nobody notices: with the hooks that torch's own layers need, without the user's."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                if not any(str(hook.__module__).startswith("torch.nn.") for hook in value.values()):
                    memo[id(value)] = OrderedDict()
            elif isinstance(value, Tensor) and not value.is_leaf:  # weight_norm's, made anew in forward
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def _profile(model: nn.Module, example: Example) -> Profile:
    found = Profile()
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    spent: Counter[str] = Counter()  # by module, without its children
    running: list[list[int]] = []  # of every module that is running: the count at its start, its children's
    handles = []
    owned: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append([counter.get_total_flops(), 0])

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            start, inside = running.pop()
            flops = counter.get_total_flops() - start
            spent[name] += flops - inside
            if running:
                running[-1][1] += flops

        return hook

    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None:
            handles.append(module.register_forward_hook(_recorder(found, name, kind), with_kwargs=True))
        if kind is not None or isinstance(module, LowRank):
            owned.append(name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave(name), always_call=True))
    with torch.enable_grad(), _plain_kernels(), counter:
        output = run(model, example)
        forward = counter.get_total_flops()
        for handle in handles:
            handle.remove()  # checkpointed modules run once more in backward
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
    found.forward_macs = forward // 2
    found.backward_macs = counter.get_total_flops() // 2 - found.forward_macs
    spent[""] += forward - sum(spent.values())  # what a callable example computes outside every module
    found.functional = {
        name: flops // 2
        for name, flops in spent.items()
        if flops > 0 and not any(name == x or name.startswith(f"{x}.") for x in owned)
    }
    return found


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without the fused kernels that the counter cannot see into: recurrent layers, attention in eval."""
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [backend.enabled for backend in backends]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for backend, value in zip(backends, enabled, strict=True):
            backend.enabled = value


def _conv_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """FLOPs of a convolution's backward. torch's own formula takes the weight's gradient for ungrouped."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = args
    places = x if transposed else grad
    macs = math.prod(weight) * places[0] * math.prod(places[2:])
    return 2 * macs * int(sum(wanted[:2]))


#: Where torch's counter is wrong (groups) or does not look (attention on the CPU).
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _conv_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def run(model: nn.Module, example: Example) -> Any:
    """The model on an example, in whichever form that was given."""
    if isinstance(example, Tensor):
        return model(example)
    if isinstance(example, Mapping):
        return model(**example)
    if callable(example):
        return example(model)
    return model(*example)


def _recorder(found: Profile, name: str, kind: type[LowRank]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = found.calls.setdefault(name, Call(args, kwargs, Counter(), Counter()))
        for matrix in kind.matrices(module):
            positions = kind.positions(matrix, args, kwargs, output)
            call.positions[matrix.name] += positions
            without = _without_gradient(module, matrix, positions, args, kwargs, output)
            call.grad_positions[matrix.name] += positions - without

    return record


#: Of layers with several matrices: those that see an argument of the layer, and which. The others see what
#: the layer computes itself.
_ARGUMENTS = {
    nn.MultiheadAttention: (("query", "key", "value"), {"q": "query", "k": "key", "v": "value"}),
    nn.RNNBase: (("input", "hx"), {"weight_ih_l0": "input", "weight_ih_l0_reverse": "input"}),
}


def _without_gradient(
    module: nn.Module,
    matrix: Matrix,
    positions: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> int:
    """How many of the vectors that a matrix was multiplied with backward wants no gradient of."""
    sources = pytree.tree_leaves((args, kwargs))
    for kind, (arguments, seen_by) in _ARGUMENTS.items():
        if not isinstance(module, kind):
            continue
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if matrix.name in seen_by:
            sources = pytree.tree_leaves(given[seen_by[matrix.name]])
            continue
        sources += module.parameters()
        start = pytree.tree_leaves(given.get("hx"))
        if matrix.name.startswith("weight_hh") and _any_gradient(sources) and not _any_gradient(start):
            state = pytree.tree_leaves(output[1])[0]
            return int(
                state.numel() // (state.shape[0] * state.shape[-1])
            )  # the first step of every sequence
    return 0 if _any_gradient(sources) else positions


def _any_gradient(values: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in values)


def measure(dense: nn.Module, low_rank: nn.Module, call: Call, graph: bool = False) -> tuple[float, float]:
    """Milliseconds of forward + backward of a layer, dense and low-rank, on inputs like the example's.

    Both run in turn, warmed up; medians. The layers are copies: no gradient reaches the model. With
    `graph` they are replays of a CUDA graph: what the device needs, without the time to launch kernels.
    """
    device = next(dense.parameters()).device
    steps = [_step(layer, call, device) for layer in (dense, low_rank)]
    if graph:
        steps = [_captured(step) for step in steps]
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for step, seen in zip(steps, times, strict=True):
            timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
            seen.append(timer.blocked_autorange(min_run_time=0.03).median * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _step(layer: nn.Module, call: Call, device: torch.device) -> Callable[[], None]:
    generator = torch.Generator(device).manual_seed(0)

    def like(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # real ones may be lengths or indices and are kept
            return torch.zeros_like(x, device=device) if x.is_meta else x
        fresh = torch.empty_like(x, device=device, requires_grad=False)
        return fresh.normal_(generator=generator).requires_grad_(x.requires_grad)

    layer = hollow(layer).to_empty(device=device)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02, generator=generator)
    args, kwargs = pytree.tree_map_only(Tensor, like, (call.args, call.kwargs))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    wanted = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]

    def step() -> None:
        output = layer(*args, **kwargs)
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            ones = [torch.ones_like(x) for x in leaves]
            torch.autograd.grad(leaves, wanted, cast(Any, ones), allow_unused=True)

    for _ in range(2):
        step()
    return step


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # capturing wants its warm-up away from the default stream
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay
