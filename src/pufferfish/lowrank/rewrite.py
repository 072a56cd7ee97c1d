"""`Rewrite`: new layers and optimizer state, prepared beside the old ones and then assigned, all of them or none."""

import copy
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import FactorMap, LowRank, LowRankLinear, SharedInput, low_rank_type
from ..layers.base import CALL_HOOKS
from ..layers.names import named_modules
from ..optim.carry import Carrier, Optimizers, Undo, as_list, check_optimizers
from ..planning.entries import Entry
from ..planning.plan import Plan
from ..planning.text import track
from .checks import check_hooks, check_layer_accepted, check_not_sharded, replaced_parameters

#: Returns down.weight, up.weight and the relative error (None: unknown) of one matrix, given its dense parameter.
Fill = Callable[[Entry, Tensor], tuple[Tensor, Tensor, float | None]]
#: Calls a function on all workers that change a model together, and returns its result; an error of one is raised on all.
OnAll = Callable[[Callable[[], Any]], Any]


def alone(work: Callable[[], Any]) -> Any:
    """`OnAll` of a single process."""
    return work()


def replace_layers_(
    model: nn.Module, plan: Plan, optimizer: Optimizers, fill: Fill, on_all: OnAll = alone
) -> Plan:
    """Replace dense layers by low-rank ones, after `check_plan`. Returns the plan with the errors that `fill` returned.

    Args:
        plan: with all ranks.
        fill: gives the factors of each matrix.
    """
    change = Rewrite(model, optimizer)
    done: Plan = on_all(lambda: change.factorize(plan, fill))

    def commit(undo: Undo) -> None:
        on_all(lambda: None)  # all are prepared: from here on, each of them finishes
        change.commit(undo)

    all_or_nothing(commit)
    change.carrier.warn_of_resets()
    return done


def merge_layers_(model: nn.Module, optimizer: Optimizers) -> None:
    """`merge_` for the inner model of a wrapper, which the caller updates."""
    change = Rewrite(model, optimizer)
    change.merge()
    all_or_nothing(change.commit)
    change.carrier.warn_of_resets()


def all_or_nothing(change: Callable[[Undo], None]) -> None:
    """Call `change`. If it raises anything, take back the assignments that it has made through `Undo`."""
    undo = Undo()
    with _stops_wait():
        try:
            change(undo)
        except BaseException:
            undo.run()
            raise


class Rewrite:
    """A change of a model's layers and of its optimizers.

    `factorize` or `merge` computes everything beside the model, which stays as it is, and `commit` assigns it.

    Args:
        carry: whether optimizer state is carried over to the new parameters, or dropped.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, carry: bool = True) -> None:
        self.model = model
        self._optimizers = as_list(optimizer)
        check_optimizers(self._optimizers)
        self.carrier = Carrier(self._optimizers, model, carry)
        self._layers: dict[str, nn.Module] = {}  # the new ones, by path

    def factorize(self, plan: Plan, fill: Fill) -> Plan:
        """Prepare low-rank layers. Returns the plan with the errors that `fill` returned."""
        paths = {name: path for name, path, _ in named_modules(self.model)}
        # All structures first, on the meta device: the constructor of a registered layer type may raise.
        structures = {
            layer: _structure(self.model.get_submodule(paths[layer]), r) for layer, r in plan.ranks.items()
        }
        for layer, low_rank in structures.items():
            dense = self.model.get_submodule(paths[layer])
            check_layer_accepted(layer, low_rank, dense, self._optimizers)
        errors: dict[str, float | None] = {}
        for layer, low_rank in track(structures.items(), "factorizing layers"):
            dense, ranks = self.model.get_submodule(paths[layer]), low_rank.ranks
            mapping = FactorMap(low_rank.matrices(dense), ranks, dict(dense.named_parameters()), {})
            for e in (e for e in plan.entries if e.layer == layer and e.rank is not None):
                assert e.matrix is not None
                weight = mapping.dense[e.matrix.weight]
                down, up, errors[e.name] = fill(e, weight)
                for name, value in ((e.matrix.down, down), (e.matrix.up, up)):
                    mapping.low_rank[name] = _parameter(value, weight)
            for x in mapping.matrices:
                for source, index, target in x.copied_slices(x.name in ranks):
                    old = mapping.dense[source]
                    part = old.detach()[index]
                    mapping.low_rank[target] = old if part.shape == old.shape else _parameter(part, old)
            for name, _ in list(low_rank.named_parameters()):
                # Parameters of no matrix, such as the biases of a recurrent layer, keep their names.
                if name not in mapping.low_rank:
                    mapping.low_rank[name] = mapping.dense[name]
                set_parameter(low_rank, name, mapping.low_rank[name])
            self.carrier.to_factors(mapping)
            self._put(paths[layer], dense, low_rank)
        for names in plan.shared_inputs:
            layers = [x for x in map(structures.get, names) if isinstance(x, LowRankLinear)]
            if len(layers) > 1:
                SharedInput(layers)
        kinds = {kind for module in self.model.modules() for kind in type(module).__mro__}
        if any(
            kind.__module__.startswith("transformers.") for kind in kinds
        ):  # a model of it, or a part of one
            from ..integrations import pretrained  # noqa: F401  # extends the save_pretrained of its models
        return plan.replace(
            dataclasses.replace(e, error=errors[e.name]) if e.name in errors else e for e in plan.entries
        )

    def merge(self) -> None:
        """Prepare dense layers with the products of all factors."""
        check_not_sharded(self.model, "merge_")
        found: dict[str, LowRank] = {}
        for name, path, module in named_modules(self.model):
            if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in found):
                if path == "":
                    raise ValueError("the model itself is the low-rank layer; wrap it in an nn.Sequential")
                dense = module._dense[0]
                matrices = module.matrices(dense)
                check_hooks(name, module, replaced_parameters(matrices, module.ranks, dense)[1])
                found[path] = module
        for path, low_rank in found.items():
            attributes = {id(x): x for k, x in vars(low_rank._dense[0]).items() if not k.startswith("_")}
            dense = copy.deepcopy(low_rank._dense[0], attributes)  # these stay the same objects
            for name in vars(dense).keys() & vars(low_rank).keys():
                if not name.startswith("_"):  # dropout, training, …, which may have been set since then
                    setattr(dense, name, getattr(low_rank, name))
            matrices = low_rank.matrices(dense)
            mapping = FactorMap(matrices, low_rank.ranks, {}, dict(low_rank.named_parameters()))
            for name, meta in list(dense.named_parameters()):
                mapping.dense[name] = _dense_parameter(name, meta, mapping)
                set_parameter(dense, name, mapping.dense[name])
            if isinstance(dense, nn.RNNBase):
                dense.flatten_parameters()
            self.carrier.to_dense(mapping)
            self._put(path, low_rank, dense)

    def commit(self, undo: Undo) -> None:
        """Assign what was prepared."""
        for path, new in self._layers.items():
            owner, _, leaf = path.rpartition(".")
            undo.setattr(self.model.get_submodule(owner), leaf, new)
        self.carrier.commit(undo)

    def _put(self, path: str, old: nn.Module, new: nn.Module) -> None:
        """Note the layer that takes the place of `old`, with its training mode and call hooks."""
        new.train(old.training)
        for hooks in CALL_HOOKS:
            if hooks in vars(old):
                vars(new)[hooks] = vars(old)[hooks]
        self._layers[path] = new


@contextmanager
def _stops_wait() -> Iterator[None]:
    """Let signals that ask the process to stop, such as ctrl-C, take effect after the block; a second one does at once."""
    if threading.current_thread() is not threading.main_thread():  # the only one that handles signals
        yield
        return
    arrived: list[int] = []

    def wait(number: int, frame: Any) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            handlers[number](number, frame)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # those that this system has
    handlers: dict[int, Any] = {n: h for n in numbers if callable(h := signal.getsignal(n))}
    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(arrived) == 1:
            signal.raise_signal(arrived[0])


def _structure(dense: nn.Module, ranks: dict[str, int]) -> LowRank:
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind(dense, ranks)


def empty_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized factors with the dtype and device of `weight`."""
    assert e.matrix is not None
    assert e.rank is not None
    x = e.matrix
    U = weight.new_empty(x.blocks, x.m, e.rank, requires_grad=False)
    V = weight.new_empty(x.blocks, e.rank, x.n, requires_grad=False)
    return x.from_factors(U, V)


def nan_factors(e: Entry, weight: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors filled with NaN, to be loaded later."""
    down, up = empty_factors(e, weight)
    return down.fill_(float("nan")), up.fill_(float("nan")), e.error


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with the values of `value` and the dtype, memory format, flags and attributes of `like`."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)
    # Compare strides: the weight of a 1 × 1 convolution is contiguous in both formats, but its gradient is not.
    if (
        like.dim() != value.dim()
        or like.stride() != torch.empty_like(like, device="meta", memory_format=order).stride()
    ):
        order = torch.contiguous_format
    stride = torch.empty_like(value, device="meta", memory_format=order).stride()
    own_memory = value.untyped_storage().nbytes() == value.nbytes  # no part of a larger tensor
    if not (own_memory and value.dtype == like.dtype and value.stride() == stride):
        value = torch.empty_like(value, dtype=like.dtype, memory_format=order).copy_(value)
    return _with_flags(value, like)


def _with_flags(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with the flags of `like`, and with its attributes that are no tensors or other objects of its own.

    A `main_grad` has the shape of the dense parameter, and the copies that DDP's mixed precision attaches are its values.
    """
    parameter = nn.Parameter(value, like.requires_grad)
    for key, attribute in vars(like).items():
        if all(isinstance(x, bool | int | float | str | None) for x in pytree.tree_leaves(attribute)):
            vars(parameter)[key] = copy.deepcopy(attribute)
    return parameter


@torch.no_grad()
def _dense_parameter(name: str, meta: Tensor, mapping: FactorMap) -> Tensor:
    """One dense parameter, computed from the parameters of a low-rank layer."""
    parts = [mapping.low_rank[part] for part in mapping.targets.get(name, [name])]
    if len(parts) == 1:
        return parts[0]  # unchanged or only renamed: the same object
    whole = torch.empty_like(meta, device=parts[0].device, dtype=parts[0].dtype)
    mapping.assemble(
        name,
        whole,
        lambda x: x.product_fp32(mapping.low_rank[x.down], mapping.low_rank[x.up]),
        lambda part: mapping.low_rank[part],
    )
    return _with_flags(whole, parts[-1])  # in the memory format of `meta`


def set_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Assign a parameter by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
