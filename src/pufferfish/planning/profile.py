"""One step of a model on an example: its MACs, and how each layer is called in it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ..layers import LowRank, hollow, low_rank_type
from ..layers.names import named_modules, unwrap

#: One batch: a tensor, positional arguments, keyword arguments, or a function that runs the model.
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass
class Call:
    """How a layer was called in the example."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Counter[str]  # by matrix: the vectors it was multiplied with, all calls together
    grad_positions: Counter[str]  # those of them that backward wants the gradient of
    autocast: torch.dtype | None = None  # that the example's own code entered


@dataclass
class Profile:
    """The MACs of one step on the example, and how each layer was called in it."""

    forward_macs: int = 0
    backward_macs: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    functional: dict[str, int] = field(default_factory=dict)  # MACs outside layers a plan could change
    read: set[str] = field(default_factory=set)  # layers whose parameters other code computes with


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

    watch = _Watch(model)
    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leave, always_call=True))
        if kind is not None:
            handles.append(module.register_forward_hook(_recorder(found, name, kind), with_kwargs=True))
        if kind is not None or isinstance(module, LowRank):
            owned.append(name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave(name), always_call=True))
    with torch.enable_grad(), _plain_kernels(), counter:
        with watch:
            output = run(model, example)
        forward = counter.get_total_flops()
        for handle in handles:
            handle.remove()  # checkpointed modules run once more in backward
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
    found.read = watch.read
    found.forward_macs = forward // 2
    found.backward_macs = counter.get_total_flops() // 2 - found.forward_macs
    spent[""] += forward - sum(spent.values())  # what a callable example computes outside every module
    found.functional = {
        name: flops // 2
        for name, flops in spent.items()
        if flops > 0 and not any(name == x or name.startswith(f"{x}.") for x in owned)
    }
    return found


class _Watch(TorchFunctionMode):
    """Notices when a layer's matrix is used while the layer itself does not run, as in `F.linear(x, a.weight.t())`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read: set[str] = set()
        self._running: list[nn.Module] = []
        self._owners = {
            id(parameter): (name, module)
            for name, _, module in named_modules(model)
            if low_rank_type(type(module)) is not None
            for parameter in module.parameters()
            if not is_lazy(parameter) and parameter.dim() > 1
        }

    def enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # looking at a dtype or a size is free
            for x in args:
                name, owner = self._owners.get(id(x), ("", None))
                if owner is not None and owner not in self._running:
                    self.read.add(name)
        return result


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


def autocast(device: torch.device) -> torch.dtype | None:
    """What runs there now runs in.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast(torch.device("cpu"))
    torch.bfloat16
    """
    known = device.type != "meta" and torch.is_autocast_enabled(device.type)  # torch knows of none on meta
    return torch.get_autocast_dtype(device.type) if known else None


def entered(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Such an autocast; None: what there is.

    >>> with entered(torch.bfloat16, torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def _recorder(found: Profile, name: str, kind: type[LowRank]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtype = autocast(next(module.parameters()).device)
        call = found.calls.setdefault(name, Call(args, kwargs, Counter(), Counter(), dtype))
        for matrix in kind.matrices(module):
            call.positions[matrix.name] += kind.positions(matrix, args, kwargs, output)
            call.grad_positions[matrix.name] += kind.grad_positions(matrix, module, args, kwargs, output)

    return record
