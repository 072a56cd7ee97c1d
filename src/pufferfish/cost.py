"""What a model and its layers cost: parameters, MACs, bytes on the wire, memory, measured milliseconds."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from .layers import LowRank, hollow, low_rank_type
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
    parameters = list(unwrap(model).parameters())
    trainable = [p for p in parameters if p.requires_grad]
    return Totals(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        forward_macs=profile and profile.forward_macs,
        backward_macs=profile and profile.backward_macs,
    )


@dataclass
class Call:
    """How a layer was called in the example."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: dict[str, int]  # by matrix: the vectors it was multiplied with, all calls together
    input_grad: bool  # whether backward goes on below this layer


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
        shadow = hollow(model)
        try:
            return _profile(shadow, pytree.tree_map_only(Tensor, lambda x: x.to("meta"), example))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            pass  # an operator without a meta kernel, or a look at values
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _profile(copy.deepcopy(model), example)


def _profile(model: nn.Module, example: Example) -> Profile:
    found = Profile()
    owned = set()
    handles = []
    for name, path, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None:
            handles.append(module.register_forward_hook(_recorder(found, name, kind), with_kwargs=True))
            owned.add(path)
    counter = FlopCounterMode(display=False)
    with torch.enable_grad(), counter:
        output = run(model, example)
        found.forward_macs = counter.get_total_flops() // 2
        found.functional = _functional(counter, owned)
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
        found.backward_macs = counter.get_total_flops() // 2 - found.forward_macs
    for handle in handles:
        handle.remove()
    return found


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
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        call = Call(args, kwargs, {}, any(x.requires_grad for x in inputs))
        call = found.calls.setdefault(name, call)
        for matrix in kind.matrices(module):
            positions = kind.positions(matrix, args, kwargs, output)
            call.positions[matrix.name] = call.positions.get(matrix.name, 0) + positions

    return record


def _functional(counter: FlopCounterMode, owned: set[str]) -> dict[str, int]:
    """MACs that modules do themselves, outside their children and outside the layers a plan knows."""
    counts = {k: sum(v.values()) // 2 for k, v in counter.get_flop_counts().items() if k != "Global"}
    root = min(counts, key=len, default="")
    paths = {key: key.removeprefix(root).removeprefix(".") for key in counts}
    known = {
        key for key, path in paths.items() if path in owned or any(path.startswith(f"{x}.") for x in owned)
    }
    own = dict(counts)
    for key, macs in counts.items():
        above = [other for other in counts if key.startswith(f"{other}.")]
        if above:
            own[max(above, key=len)] -= macs
    return {paths[key]: macs for key, macs in own.items() if macs > 0 and key not in known}


def measure(dense: nn.Module, low_rank: nn.Module, call: Call) -> tuple[float, float]:
    """Milliseconds of forward + backward of a layer, dense and low-rank, on inputs like the example's.

    Both run in turn, warmed up; medians. The layers are copies: no gradient reaches the model.
    """
    device = next(dense.parameters()).device
    steps = [_step(layer, call, device) for layer in (dense, low_rank)]
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for step, seen in zip(steps, times, strict=True):
            timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
            seen.append(timer.blocked_autorange(min_run_time=0.03).median * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _step(layer: nn.Module, call: Call, device: torch.device) -> Callable[[], None]:
    generator = torch.Generator(device).manual_seed(0)

    def like(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros_like(x, device=device)
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
