"""`Rewrite`: new layers and optimizer state, prepared beside the old ones and then assigned, all of them or none."""

import copy
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import FactorMap, LowRank, LowRankLinear, SharedInput, low_rank_type
from ..layers.base import CALL_HOOKS
from ..layers.matrix import Part, product
from ..layers.names import join_name, named_modules, own_name
from ..planning.entries import Entry
from ..planning.plan import Plan
from ..planning.text import track
from .carry import Carrier, Optimizers, Undo, as_list, check_optimizers
from .checks import check_accepted, check_hooks, check_not_sharded

#: Returns U (blocks, m, r), V (blocks, r, n) and the relative error (None: unknown) of a matrix W (blocks, m, n).
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
        self.carrier = Carrier(self._optimizers, model.parameters(), carry)
        self._layers: dict[str, nn.Module] = {}  # the new ones, by path

    def factorize(self, plan: Plan, fill: Fill) -> Plan:
        """Prepare low-rank layers. Returns the plan with the errors that `fill` returned."""
        paths = {name: path for name, path, _ in named_modules(self.model)}
        # All structures first, on the meta device: the constructor of a registered layer type may raise.
        structures = {layer: self._structure(layer, paths[layer], r) for layer, r in plan.ranks.items()}
        errors: dict[str, float | None] = {}
        entries = {e.name: e for e in plan.entries}
        for layer, low_rank in track(structures.items(), "factorizing layers"):

            def factored(part: Part, W: Tensor, layer: str = layer) -> tuple[Tensor, Tensor]:
                e = entries[join_name(layer, part.name)]
                U, V, errors[e.name] = fill(e, W)
                return U, V

            self._split(paths[layer], low_rank, factored)
        for names in plan.shared_inputs:
            layers = [x for x in map(structures.get, names) if isinstance(x, LowRankLinear)]
            if len(layers) > 1:
                SharedInput(layers)
        modules = {kind.__module__ for module in self.model.modules() for kind in type(module).__mro__}
        if any(x.startswith("transformers.") for x in modules):  # a model of it, or a part of one
            from ..integrations import pretrained  # noqa: F401  # extends the save_pretrained of its models
        return plan.replace(
            dataclasses.replace(e, error=errors[e.name]) if e.name in errors else e for e in plan.entries
        )

    def _structure(self, layer: str, path: str, ranks: dict[str, int]) -> LowRank:
        """A low-rank layer without values, whose parameters the optimizers accept."""
        dense = self.model.get_submodule(path)
        kind = low_rank_type(type(dense))
        assert kind is not None
        low_rank = kind(dense, ranks)
        for name, targets in low_rank.factor_map.replaced.items():
            for target in targets:
                factor, weight = low_rank.get_parameter(target), dense.get_parameter(name)
                check_accepted(f"{layer}.{target}", factor, [weight], self._optimizers)
        return low_rank

    def _split(
        self, path: str, low_rank: LowRank, factored: Callable[[Part, Tensor], tuple[Tensor, Tensor]]
    ) -> None:
        """Prepare one low-rank layer, given its structure and the factors of its matrices."""
        dense, factor_map = self.model.get_submodule(path), low_rank.factor_map
        for name, old in dense.named_parameters(remove_duplicate=False):
            new = dict.fromkeys(factor_map.targets.get(name, (name,)), old)  # renamed: the same object
            if len(new) > 1:
                pieces = factor_map.split(name, old.detach(), factored)
                new = {target: _parameter(value, old) for target, value in pieces}
                self.carrier.split(factor_map, name, old, new)
            for target, parameter in new.items():
                set_parameter(low_rank, target, parameter)
        self._put(path, dense, low_rank)

    def merge(self) -> None:
        """Prepare dense layers with the products of all factors."""
        check_not_sharded(self.model, "merge_")
        found: dict[str, LowRank] = {}
        for name, path, module in named_modules(self.model):
            if isinstance(module, LowRank) and not any(path.startswith(f"{outer}.") for outer in found):
                if path == "":
                    raise ValueError("the model itself is the low-rank layer; wrap it in an nn.Sequential")
                replaced = module.factor_map.replaced.values()
                check_hooks(name, module, [target for targets in replaced for target in targets])
                found[path] = module
        for path, low_rank in found.items():
            self._join(path, low_rank)

    def _join(self, path: str, low_rank: LowRank) -> None:
        """Prepare one dense layer."""
        attributes = {id(x): x for k, x in vars(low_rank._dense[0]).items() if not k.startswith("_")}
        dense = copy.deepcopy(low_rank._dense[0], attributes)  # these stay the same objects
        for name in vars(dense).keys() & vars(low_rank).keys():
            if not name.startswith("_"):  # dropout, training, …, which may have been set since then
                setattr(dense, name, getattr(low_rank, name))
        factor_map = low_rank.factor_map
        for name, meta in list(dense.named_parameters(remove_duplicate=False)):
            old = {t: low_rank.get_parameter(t) for t in factor_map.targets.get(name, (name,))}
            new = next(iter(old.values()))  # renamed: the same object
            if len(old) > 1:
                new = _dense_parameter(factor_map, name, old, meta)
                self.carrier.join(factor_map, name, old, new)
            set_parameter(dense, name, new)
        if isinstance(dense, nn.RNNBase):
            dense.flatten_parameters()
        self._put(path, low_rank, dense)

    def commit(self, undo: Undo) -> None:
        """Assign what was prepared."""
        for path, new in self._layers.items():
            owner, _, leaf = path.rpartition(".")
            undo.setattr(self.model.get_submodule(owner), leaf, new)
        self.carrier.commit(undo, {own_name(name): p for name, p in self.model.named_parameters()})

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


def nan_factors(e: Entry, W: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Factors filled with NaN, to be loaded later."""
    U, V = empty_factors(e, W)
    return U.fill_(float("nan")), V.fill_(float("nan")), e.error


def empty_factors(e: Entry, like: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized factors U and V with the dtype and device of `like`."""
    assert e.matrix is not None
    assert e.rank is not None
    U = like.new_empty(e.matrix.blocks, e.matrix.m, e.rank, requires_grad=False)
    return U, like.new_empty(e.matrix.blocks, e.rank, e.matrix.n, requires_grad=False)


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
def _dense_parameter(
    factor_map: FactorMap, name: str, old: Mapping[str, Tensor], meta: Tensor
) -> nn.Parameter:
    """One dense parameter, computed from several low-rank ones."""
    first, *_, last = old.values()
    out = torch.empty_like(meta, device=first.device, dtype=first.dtype)  # in the memory format of `meta`
    return _with_flags(factor_map.join(name, old.__getitem__, product, out), last)


def set_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Assign a parameter by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
