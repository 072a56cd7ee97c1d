"""`profile`: run one step of a model on an example, count its MACs and record how each layer is called."""

import contextlib
import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ..layers import LowRank, low_rank_type, meta_copy
from ..layers.names import named_modules, unwrap

#: One batch: a tensor, positional arguments, keyword arguments, or a function that runs the model.
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass
class Call:
    """The first call of a layer in the example, and counts over all its calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Counter[str]  # by matrix: number of vectors multiplied by it in all calls
    grad_positions: Counter[str]  # by matrix: number of these whose gradient is computed in backward
    autocast: torch.dtype | None = None  # autocast dtype that the example's code enabled


@dataclass
class Profile:
    """MACs of one step on the example, and how each layer was called in it."""

    forward_macs: int = 0
    backward_macs: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    functional: dict[str, int] = field(default_factory=dict)  # module → MACs outside of known layers
    read_outside: set[str] = field(default_factory=set)  # layers whose weights are used outside of them


def profile(model: nn.Module, example: Example) -> Profile:
    """Run one forward and backward pass and count MACs.

    The pass runs on a copy with meta tensors: no arithmetic and no memory, and the model, its gradients, its
    batch statistics and the random state do not change. If a model needs real values (data-dependent
    branches, packed sequences), a real copy runs instead.
    """
    model = unwrap(model)
    if not callable(example):
        # Operators without a meta kernel and code that reads values may raise anything; a real error is
        # raised again below.
        with contextlib.suppress(Exception):
            return _profile(meta_copy(model), _copies(example, torch.device("meta")))
        example = _copies(example, None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _profile(_private_copy(model), example)


def _copies(example: Example, device: torch.device | None) -> Example:
    """Copy the example's tensors, so that the model cannot change the user's."""

    def fresh(x: Tensor) -> Tensor:
        return x.detach().clone().to(device or x.device).requires_grad_(x.requires_grad)

    return cast(Example, pytree.tree_map_only(Tensor, fresh, example))


def _private_copy(model: nn.Module) -> nn.Module:
    """Copy the model with the hooks that torch's own layers need and without the user's."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                if not any(str(hook.__module__).startswith("torch.nn.") for hook in value.values()):
                    memo[id(value)] = OrderedDict()
            elif isinstance(value, Tensor) and not value.is_leaf:  # of weight_norm, computed again in forward
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def _profile(model: nn.Module, example: Example) -> Profile:
    result = Profile()
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    spent: Counter[str] = Counter()  # FLOPs by module, without its children
    # For each running module: FLOPs counted at its start, FLOPs of its children.
    running: list[list[int]] = []
    handles = []
    owned: list[str] = []
    weight_use = _WeightUse(model)

    def enter(module: nn.Module, args: Any) -> None:
        weight_use.running.append(module)
        running.append([counter.get_total_flops(), 0])

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weight_use.running.pop()
            start, children = running.pop()
            flops = counter.get_total_flops() - start
            spent[name] += flops - children
            if running:
                running[-1][1] += flops

        return hook

    for name, _, module in named_modules(model):
        kind = low_rank_type(type(module))
        if kind is not None:
            handles.append(module.register_forward_hook(_recorder(result, name, kind), with_kwargs=True))
        if kind is not None or isinstance(module, LowRank):
            owned.append(name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave(name), always_call=True))
    with torch.enable_grad(), _plain_kernels(), counter:
        with weight_use:
            output = run_example(model, example)
        forward = counter.get_total_flops()
        for handle in handles:
            handle.remove()  # modules with activation checkpointing run again in backward
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
    result.read_outside = weight_use.read_outside
    result.forward_macs = forward // 2
    result.backward_macs = counter.get_total_flops() // 2 - result.forward_macs
    spent[""] += forward - sum(spent.values())  # computed by a callable example outside of all modules
    result.functional = {
        name: flops // 2
        for name, flops in spent.items()
        if flops > 0 and not any(name == x or name.startswith(f"{x}.") for x in owned)
    }
    return result


class _WeightUse(TorchFunctionMode):
    """Detect weights that are used while their layer is not running, as in `F.linear(x, a.weight.t())`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read_outside: set[str] = set()
        self.running: list[nn.Module] = []
        self._owners = {
            id(parameter): (name, module)
            for name, _, module in named_modules(model)
            if low_rank_type(type(module)) is not None
            for parameter in module.parameters()
            if not is_lazy(parameter) and parameter.dim() > 1
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # reading a dtype or a size is not a use
            for x in args:
                name, owner = self._owners.get(id(x), ("", None))
                if owner is not None and owner not in self.running:
                    self.read_outside.add(name)
        return result


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Disable the fused kernels that the counter cannot count: recurrent layers, attention in eval mode."""
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


def _conv_backward(grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *args: Any, **_: Any) -> int:
    """FLOPs of a convolution's backward. torch's formula ignores groups for the gradient of the weight."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = args
    shape = x if transposed else grad
    macs = math.prod(weight) * shape[0] * math.prod(shape[2:])
    return 2 * macs * int(sum(output_mask[:2]))


#: Formulas that torch's counter has wrong (grouped convolutions) or lacks (attention on the CPU).
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _conv_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def run_example(model: nn.Module, example: Example) -> Any:
    """Run the model on an example of any form and return its output."""
    if isinstance(example, Tensor):
        return model(example)
    if isinstance(example, Mapping):
        return model(**example)
    if callable(example):
        return example(model)
    return model(*example)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the active autocast on a device, or None."""
    # torch raises for the meta device, which has no autocast.
    enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def autocast_context(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Enable autocast with `dtype`; None leaves autocast as it is."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def _recorder(result: Profile, name: str, kind: type[LowRank]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtype = autocast_dtype(next(module.parameters()).device)
        call = result.calls.setdefault(name, Call(args, kwargs, Counter(), Counter(), dtype))
        for matrix in kind.matrices(module):
            call.positions[matrix.name] += kind.positions(matrix, args, kwargs, output)
            call.grad_positions[matrix.name] += kind.grad_positions(matrix, module, args, kwargs, output)

    return record
