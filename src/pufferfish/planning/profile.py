"""`profile`: run one step of a model on an example, count its MACs and record how each layer is called."""

import contextlib
import copy
import logging
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..layers import LowRank, low_rank_type, named_modules, unwrap
from ..layers.base import CALL_HOOKS, HOOKS, autocast_dtype, kept_as_they_are
from ..layers.product_weight import asks_metadata

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
    count: int = 0  # number of calls


@dataclass
class Profile:
    """MACs of one step on the example, and how each layer was called in it."""

    forward_macs: int = 0
    backward_macs: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)  # module → its MACs; 0 without a FLOP formula
    functional: dict[str, int] = field(default_factory=dict)  # module → MACs outside of known layers
    read_outside: set[str] = field(default_factory=set)  # layers whose weights are used outside of them


def profile(model: nn.Module, example: Example) -> Profile:
    """Run one forward and backward pass and count MACs.

    The pass runs on a copy with fake tensors: no arithmetic and no memory, and the model, its gradients, its
    batch statistics and the random state do not change. If a model reads values of tensors, or if the example is a
    function, a real copy runs instead.
    """
    model = unwrap(model)
    devices = {p.device for p in model.parameters()}
    on_meta = any(device.type == "meta" for device in devices)
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        if callable(example) and not on_meta:
            return _profile(private_copy(model), example)
        with sdpa_kernel(SDPBackend.MATH):  # other kernels compute some products again in backward
            try:
                return _fake_profile(model, example)
            except Exception as error:  # code that reads values, and operators without a fake kernel
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
                if on_meta:
                    raise ValueError(
                        f"the example does not run on fake tensors ({reason}). If it fits the model, the model reads "
                        "values: use a model with real weights, or plan without example="
                    ) from error
            size = sum(p.nbytes for p in model.parameters() if not is_lazy(p))
            warnings.warn(
                f"the example does not run on fake tensors ({reason}), so MACs are counted on a real copy of the model "
                f"({size / 2**20:,.0f} MiB of parameters, more for activations and gradients); plan without example=, "
                "or with a shorter one, to avoid this",
                stacklevel=3,
            )
            return _profile(private_copy(model), _copies(example, Tensor.clone))


def private_copy(model: nn.Module, copy_tensor: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Copy a model with the hooks that it needs, and without the user's, which may have side effects.

    Args:
        copy_tensor: Copies the model's tensors. By default they are cloned.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> _ = layer.register_forward_hook(lambda *args: print("called"))
    >>> private_copy(layer)(torch.zeros(1, 4)).shape
    torch.Size([1, 2])
    """
    memo = kept_as_they_are(model)
    for module in model.modules():
        memo |= {id(getattr(module, name)): OrderedDict() for name in HOOKS}
        for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                if copy_tensor is not None:
                    memo[id(value)] = copy_tensor(value)
                elif not value.is_leaf:  # computed again in forward (weight_norm); deepcopy raises for it
                    memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(model, memo)
    for module in model.modules():
        hooks = [
            (name, *item) for name in HOOKS if name in CALL_HOOKS for item in getattr(module, name).items()
        ]
        needed = {key for _, key, hook in hooks if _is_needed(hook, memo)}
        for name, key, value in hooks:  # a hook's flags have the same key
            if key in needed:
                getattr(memo[id(module)], name)[key] = copy.deepcopy(value, memo)
    return copied


def _is_needed(hook: Any, memo: dict[int, Any]) -> bool:
    """Whether a hook belongs to the model: a method of its modules, or a function of torch.nn or transformers.

    transformers stores in a model that its hooks are in place, and would not install them again in the copy.
    """
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, nn.Module):
        return id(owner) in memo
    return str(getattr(hook, "__module__", "")).startswith(("torch.nn.", "transformers."))


def _fake_profile(model: nn.Module, example: Example) -> Profile:
    """The profile of a run with fake tensors. The arguments of calls are meta tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    devices = [p.device for p in model.parameters()] or [torch.device("cpu")]
    first = next((device for device in devices if device.type == "meta"), devices[0])

    def to_fake(x: Tensor) -> Tensor:
        device = first if x.is_meta or first.type == "meta" else x.device
        with fake:
            copied = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return nn.Parameter(copied, x.requires_grad) if isinstance(x, nn.Parameter) else copied

    copied, inputs = private_copy(model, to_fake), _copies(example, to_fake)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    enabled, log.disabled = log.disabled, True  # it prints a traceback where an operator has no fake kernel
    try:
        with fake:
            result = _profile(copied, inputs)
    finally:
        log.disabled = enabled
    known: dict[int, Tensor] = {}  # one for each: layers may read the same tensor

    def to_meta(x: Tensor) -> Tensor:
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return known.setdefault(id(x), meta.requires_grad_(x.requires_grad))

    arguments = [(call.args, call.kwargs) for call in result.calls.values()]
    arguments = pytree.tree_map_only(FakeTensor, to_meta, arguments)
    for call, (args, kwargs) in zip(result.calls.values(), arguments, strict=True):
        call.args, call.kwargs = args, kwargs
    return result


def _copies(example: Example, copy_tensor: Callable[[Tensor], Tensor]) -> Example:
    """Copy the example's tensors, so that the model cannot change the user's."""

    def fresh(x: Tensor) -> Tensor:
        return copy_tensor(x.detach()).requires_grad_(x.requires_grad)

    return cast(Example, pytree.tree_map_only(Tensor, fresh, example))


def _profile(model: nn.Module, example: Example) -> Profile:
    result = Profile()
    counter = FlopCounterMode(display=False, custom_mapping=flop_formulas())
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
            result.counted[name] += flops // 2
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


def _recorder(result: Profile, name: str, kind: type[LowRank]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtype = autocast_dtype(next(module.parameters()).device)
        call = result.calls.setdefault(name, Call(args, kwargs, Counter(), Counter(), dtype))
        call.count += 1
        for matrix in kind.matrices(module):
            call.positions[matrix.name] += kind.positions(matrix, args, kwargs, output)
            call.grad_positions[matrix.name] += kind.grad_positions(matrix, module, args, kwargs, output)

    return record


class _WeightUse(TorchFunctionMode):
    """Detect weights that are used while their layer is not running, as in `F.linear(x, a.weight.t())`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read_outside: set[str] = set()
        self.running: list[nn.Module] = []
        self._owners: dict[int, dict[str, nn.Module]] = {}  # layers of each weight; several if it is tied
        for name, _, module in named_modules(model):
            if low_rank_type(type(module)) is not None:
                for parameter in module.parameters():
                    if not is_lazy(parameter) and parameter.dim() > 1:
                        self._owners.setdefault(id(parameter), {})[name] = module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            owners = self._owners.get(id(x), {})
            outside = not any(module in self.running for module in owners.values())
            if owners and outside and not asks_metadata(func, args, x):
                self.read_outside |= owners.keys()
        return func(*args, **(kwargs or {}))


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


def run_example(model: nn.Module, example: Example) -> Any:
    """Run the model on an example of any form and return its output."""
    if isinstance(example, Tensor):
        return model(example)
    if isinstance(example, Mapping):
        return model(**example)
    if callable(example):
        return example(model)
    return model(*example)


def autocast_context(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Enable autocast with `dtype`; None leaves autocast as it is."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


# FLOP formulas of operators that torch's counter has wrong or lacks.

Shape = Sequence[int]

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas by operator, for `FlopCounterMode(custom_mapping=…)`."""
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten.convolution_backward: _conv_backward,
        torch.ops.aten._grouped_mm: _grouped_mm,
        **{getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"): _attention for kind in _ATTENTION},
        **{
            getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward"): _attention_backward
            for kind in _ATTENTION
        },
    }
    # Runs where the one above is not available. It exists once transformers is imported; in its backward pass it
    # calls products that are counted.
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return formulas | ({fallback: _grouped_mm} if fallback else {})


def _conv_backward(grad: Shape, x: Shape, weight: Shape, *args: Any, **_: Any) -> int:
    """Backward pass of a convolution. torch's formula ignores groups for the gradient of the weight."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = args
    shape = x if transposed else grad
    macs = math.prod(weight) * shape[0] * math.prod(shape[2:])
    return 2 * macs * int(sum(output_mask[:2]))


# torch 2.11 raises for fewer heads of keys and values than of queries, and has no formula for attention on the CPU.


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores and weighted sums of values (batch, heads, time, features)."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(grad: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores again, then the gradients of weights, values, queries and keys."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


def _grouped_mm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Products of the groups of two matrices or stacks.

    A matrix is divided into groups: its rows if the other one is a stack (rows × weights of their experts), its
    inner dimension if the other one is a matrix too (gradient of these weights).
    """
    stacks = a[0] if len(a) == len(b) == 3 else 1
    return 2 * stacks * a[-2] * a[-1] * b[-1]
