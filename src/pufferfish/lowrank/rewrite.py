"""`factorize_`, `reshape_` and `merge_`: make a model low-rank, and dense again, in place; `plan_of` a low-rank model.

New layers and optimizer state are prepared beside the old ones by a `Rewrite`; `commit` assigns all of them, or none.
"""

import copy
import dataclasses
import gc
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..distributed.ddp import Job, check_rewrap, find_ddp, rewrap_
from ..distributed.workers import Workers
from ..layers import (
    FactorMap,
    LowRank,
    LowRankEmbedding,
    LowRankLinear,
    Matrix,
    Part,
    SharedInput,
    low_rank_type,
    meta_copy,
    named_modules,
    own_name,
    unwrap,
)
from ..layers.base import CALL_HOOKS, HOOKS, unfit_reason
from ..layers.matrix import product
from ..planning import Plan, apply_rules, check_is_plan, resolve, track
from ..planning import plan as make_plan
from ..planning.svd import check_values
from .carry import Carrier, check_accepted
from .factors import Fill, nan_factors, shared_factors, shared_spectra, svd_factors
from .optimizers import Optimizers, as_list, check_optimizers, warn_of_other_optimizers

#: Share of ‖W‖² that the factors of a trained model must keep for it to work as before: rounding to 4 bits, which trained
#: models survive, has a relative error of about 0.1 too.
_KEPT = 0.99
_REMEDY = "pass it as optimizer=, or create it afterwards"


def factorize_(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizers = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Replace the planned layers by low-rank ones through a truncated SVD, in place.

    All factors are computed before the first layer is replaced, so an error or ctrl-C leaves the model unchanged. On a newly
    initialized model this is spectral initialization, for low-rank training without a warm-up. A trained model must be
    trained further: a warning says so where the factors keep too little.

    Args:
        model: Model without wrappers: factorize it before DDP and `torch.compile`.
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the current weights.
        optimizer: One or several. Their parameter groups and states are updated. New parameters go into the
            group of the old one; those that Muon does not accept (stacks of factors, as in recurrent layers) go to another
            optimizer.
        group: Process group of the workers that train this model without DDP, averaging gradients themselves; call it
            on all of them. Otherwise each computes its own factors, which the start of DDP makes equal, but nothing else.
            Parameters that differ get the values of the first worker, with a warning, and its plan is used; see
            `Switch.step` about optimizer state.

    Returns:
        The plan with all ranks and with the relative error ‖W − UV‖ / ‖W‖ of each layer, which `print` shows.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> done = pf.factorize_(model, pf.plan(model, rank=0.25))
    >>> model[0]
    LowRankLinear(
      rank=16
      (down): Linear(in_features=64, out_features=16, bias=False)
      (up): Linear(in_features=16, out_features=64, bias=True)
    )
    """
    check_not_inference("factorize_")
    check_unwrapped(model, "factorize_")
    check_is_plan(plan, "factorize_")
    fill: Fill = svd_factors
    workers = None
    if group is None:
        check_plan(model, plan)
        plan = plan if plan.resolved else resolve(plan, model)
    else:
        plan, fill, workers = _agreed(model, plan, optimizer, group)
    plan.warn_if_little_changes()
    change = Rewrite(model, optimizer)
    warn_of_other_optimizers(model, plan, change.optimizers, _REMEDY)
    # An optimizer with state goes on with a run that knows its loss; plain SGD keeps none.
    continues = any(x.state or x.defaults.get("momentum") == 0 for x in change.optimizers)
    prepare = partial(change.factorize, plan, fill)
    done = prepare() if workers is None else workers.run_on_all(prepare)
    commit([change], workers)
    change.carrier.warn_of_resets(stacklevel=3)
    kept = [1 - e.error**2 for e in done.entries if e.error is not None]
    if kept and sum(kept) < _KEPT * len(kept) and not continues and _is_trained(model):
        warnings.warn(
            f"factorize_: the factors keep {sum(kept) / len(kept):.1%} of the energy ‖W‖² on average, too little for this "
            "trained model to work as before: evaluate it, and train it further before you use it; print(plan) of the "
            "returned plan shows the error of each layer",
            stacklevel=2,
        )
    return done


def _is_trained(model: nn.Module) -> bool:
    """Whether the scales of a normalization layer differ from each other: all start equal."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    known = [p for p in weights if not (is_lazy(p) or p.is_meta)]
    return any(p.dim() == 1 and bool((p != p[:1]).any()) for p in known)


def _agreed(
    model: nn.Module, plan: Plan, optimizer: Optimizers, group: dist.ProcessGroup
) -> tuple[Plan, Fill, Workers]:
    """The plan of worker 0 with all ranks, checked on all workers, the factors that they compute together, and the workers."""
    job = Job(model, "factorize_", group)
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    job.workers.agree(repr(shapes), 0, "model (names, types, shapes); make the same call on all workers")
    plan = Plan.from_data(job.workers.run_on_first(plan.as_data))
    job.workers.run_on_all(lambda: check_optimizers(as_list(optimizer)))
    job.workers.run_on_all(lambda: check_plan(model, plan, finite=True))
    job.repair()
    if unresolved := [e.name for e in plan if e.rule is not None]:
        plan = apply_rules(plan, shared_spectra(job, unresolved))
    return plan, shared_factors(job, plan), job.workers


def reshape_(model: nn.Module, plan: Plan, optimizer: Optimizers = None) -> Plan:
    """Give a newly built dense model the low-rank structure of a plan, in place, without an SVD.

    Use it before `load_state_dict` with a checkpoint of a low-rank model. The factors are NaN until they are
    loaded, so a missing load is noticed. Works on the meta device.

    Args:
        model: Model without wrappers.
        plan: With all ranks, as returned by `factorize_`.
        optimizer: One or several. Their parameter groups are updated.

    >>> import pufferfish as pf
    >>> build = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> trained = build()
    >>> done = pf.factorize_(trained, pf.plan(trained, rank=0.25))
    >>> fresh = build()
    >>> _ = pf.reshape_(fresh, done)
    >>> fresh.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    """
    check_unwrapped(model, "reshape_")
    check_is_plan(plan, "reshape_")
    if not plan.resolved:
        unresolved = next(e.name for e in plan.entries if e.rule is not None)
        raise ValueError(
            f"{unresolved}: the plan has a rule instead of a rank; pass the plan that factorize_ returned"
        )
    check_plan(model, plan)
    change = Rewrite(model, optimizer)
    warn_of_other_optimizers(model, plan, change.optimizers, _REMEDY)
    done = change.factorize(plan, nan_factors)
    commit([change])
    change.carrier.warn_of_resets(stacklevel=3)
    return done


def low_rank_shapes(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy of a dense model after `plan`, with shapes but without values."""
    copy = meta_copy(model)
    if plan.ranks:
        reshape_(copy, plan)
    return copy


def merge_(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Replace every low-rank layer by the dense layer with the product of its factors, in place.

    Args:
        model: Plain, DDP or compiled. To continue training under DDP, call it on every worker.
        optimizer: One or several. Their parameter groups and states are updated.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model))
    >>> pf.merge_(model)
    >>> model
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
    )
    """
    check_not_inference("merge_")
    ddp = find_ddp(model)
    check_rewrap(ddp)
    change = Rewrite(unwrap(model), optimizer)
    change.merge()
    commit([change], wrappers=[ddp])  # on this worker: rank 0 may merge alone, for an export
    change.carrier.warn_of_resets(stacklevel=3)


def plan_of(model: nn.Module, dense: nn.Module | None = None) -> Plan:
    """The plan that gives the dense model the ranks that this model has now.

    Args:
        dense: The dense model, which may be on the meta device. Needed for FSDP2 models only, which cannot be copied.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8, keep=["1"]))
    >>> pf.lowrank.plan_of(model).ranks
    {'0': {'': 8}}
    """
    ranks = ranks_of(model)
    if dense is None:
        dense = meta_copy(unwrap(model))
        change = Rewrite(dense)
        change.merge()
        commit([change])
    embed = 1 if any(isinstance(m, LowRankEmbedding) for m in model.modules()) else None
    dense_plan = make_plan(dense, embed=embed)
    entries = []
    for e in dense_plan.entries:
        rank = ranks.get(e.layer, {}).get(e.matrix.name) if e.matrix else None
        reason = e.reason if e.matrix is None else "not factorized"
        entries.append(e.with_rank(rank) if rank else e.keep_dense(reason))
    layers = {e.layer for e in entries}  # not the projections inside of an attention layer
    shared: dict[int, list[str]] = {}
    for name, _, module in named_modules(model):
        if isinstance(module, LowRankLinear) and module._shared_input is not None and name in layers:
            shared.setdefault(id(module._shared_input), []).append(name)
    return dataclasses.replace(dense_plan.replace(entries), shared_inputs=tuple(map(tuple, shared.values())))


def ranks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Ranks of all low-rank layers, by layer and matrix name."""
    return {name: m.ranks for name, _, m in named_modules(model) if isinstance(m, LowRank)}


class Rewrite:
    """A change of a model's layers and of its optimizers.

    `factorize` or `merge` computes everything beside the model, which stays as it is, and `commit` assigns it.

    Args:
        carry: whether optimizer state is carried over to the new parameters, or dropped.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers = None, carry: bool = True) -> None:
        self.model = model
        self.optimizers = as_list(optimizer)
        check_optimizers(self.optimizers)
        self.carrier = Carrier(self.optimizers, model.parameters(), carry)
        self._layers: dict[str, nn.Module] = {}  # the new ones, by path

    def factorize(self, plan: Plan, fill: Fill) -> Plan:
        """Prepare low-rank layers. Returns the plan with the errors that `fill` returned."""
        paths = {name: path for name, path, _ in named_modules(self.model)}
        # All structures first, on the meta device: the constructor of a registered layer type may raise.
        uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        structures = {
            layer: self._structure(layer, paths[layer], ranks, uses) for layer, ranks in plan.ranks.items()
        }
        errors: dict[str, float | None] = {}
        entries = {e.name: e for e in plan.entries}
        for layer, low_rank in track(structures.items(), "factorizing layers"):

            def factored(part: Part, W: Tensor, layer: str = layer) -> tuple[Tensor, Tensor]:
                e = entries[own_name(layer, part.matrix.name)]
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

    def _structure(self, layer: str, path: str, ranks: dict[str, int], uses: Counter[int]) -> LowRank:
        """A low-rank layer without values, after a check that it can take the place of the dense one.

        Args:
            uses: how often the model has each parameter, by id.
        """
        dense = self.model.get_submodule(path)
        kind = low_rank_type(type(dense))
        assert kind is not None
        low_rank = kind(dense, ranks)
        replaced = low_rank.factor_map.replaced
        for name, targets in replaced.items():
            weight = dense.get_parameter(name)
            if uses[id(weight)] > 1:
                raise ValueError(f"{layer}: its {name} is shared with another layer of this model")
            if type(weight.data) is not Tensor:
                raise ValueError(f"{layer}: its {name} is a {type(weight.data).__name__}, not a plain tensor")
            for target in targets:
                factor = low_rank.get_parameter(target)
                check_accepted(f"{layer}.{target}", factor, [weight], self.optimizers)
        check_hooks(layer, dense, [*replaced])
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

    def _put(self, path: str, old: nn.Module, new: nn.Module) -> None:
        """Note the layer that takes the place of `old`, with its training mode and call hooks."""
        new.train(old.training)
        for hooks in CALL_HOOKS:
            if hooks in vars(old):
                vars(new)[hooks] = vars(old)[hooks]
        self._layers[path] = new

    def assign(self, undo: ExitStack) -> None:
        """Assign what was prepared."""
        for path, new in self._layers.items():
            owner, _, leaf = path.rpartition(".")
            assign(undo, self.model.get_submodule(owner), leaf, new)
        self.carrier.commit(undo, {own_name(name): p for name, p in self.model.named_parameters()})


def commit(
    changes: Iterable[Rewrite],
    workers: Workers | None = None,
    wrappers: Iterable[DistributedDataParallel | None] = (),
    attributes: Iterable[tuple[object, str, Any]] = (),
) -> None:
    """Assign prepared changes, and give DDP wrappers a new reducer. Compiled code notices new layers by itself.

    An error takes everything back; a signal takes effect at the end.

    Args:
        workers: begin when all of them are prepared; if one fails before, no model changes.
        wrappers: of the models that change, or of averages of them.
        attributes: object, name and value of what changes with the models.
    """
    rewrapped = [ddp for ddp in wrappers if ddp is not None]
    with _stops_wait(), ExitStack() as undo:
        if workers is not None:
            workers.run_on_all(lambda: None)  # from here on, each of them finishes
        for change in changes:
            change.assign(undo)
        for ddp in rewrapped:
            rewrap_(ddp, undo)
        for owner, name, value in attributes:
            assign(undo, owner, name, value)
        undo.pop_all()
    if rewrapped:
        gc.collect()  # an old reducer is in reference cycles: free its memory now


def assign(undo: ExitStack, owner: object, name: str, value: Any) -> None:
    """Set an attribute that is there, so that `undo` takes it back."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


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


def check_unwrapped(model: nn.Module, function: str) -> None:
    """Raise ValueError if the model is inside a wrapper such as DDP, or compiled."""
    if unwrap(model) is not model:
        raise ValueError(
            f"{function}: the model is wrapped in {type(model).__name__}; call it on the inner model "
            "(model.module under DDP), then wrap; pf.Switch changes a wrapped model in place"
        )
    if (module := find_compiled(model)) is not None:
        raise ValueError(
            f"{function}: {type(module).__name__} is already compiled; call it before torch.compile"
        )


def check_not_inference(function: str) -> None:
    """Raise RuntimeError in `torch.inference_mode`, whose tensors can never be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{function}: parameters created in torch.inference_mode cannot be trained; call it outside of this mode"
        )


def check_not_sharded(model: nn.Module, function: str) -> None:
    """Raise ValueError for an FSDP2 model."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{function}: the model is sharded (FSDP2); load its full state dict (get_model_state_dict of "
            "torch.distributed.checkpoint.state_dict) into a model with the same plan that is not sharded, and pass that"
        )


def find_compiled(model: nn.Module) -> nn.Module | None:
    """The first compiled module in the model, if there is one."""
    compiled = (m for m in model.modules() if "_orig_mod" in m._modules or m._compiled_call_impl is not None)
    return next(compiled, None)


def check_plan(model: nn.Module, plan: Plan, finite: bool = False) -> None:
    """Raise ValueError unless the model has the plan's layers, with the same types and shapes.

    Args:
        finite: also check that the weights to factorize are finite.
    """
    layers = {name: module for name, _, module in named_modules(model)}
    for e in plan.entries:
        if e.matrix is None:
            continue
        module = layers.get(e.layer)
        if module is None:
            raise ValueError(f"{e.name}: the plan has this layer, but the model does not")
        if type(module).__name__ != e.type:
            hint = "; it is already low-rank" * isinstance(module, LowRank)
            raise ValueError(
                f"{e.name}: the plan is for a {e.type}, the model has a {type(module).__name__}{hint}"
            )
        kind = low_rank_type(type(module))
        if kind is None:
            raise ValueError(
                f"{e.name}: no low-rank form is registered for {e.type}; call pufferfish.register first"
            )
        if reason := unfit_reason(module):
            raise ValueError(f"{e.name}: {reason}")
        matrix = {x.name: x for x in kind.matrices(module)}.get(e.matrix.name)
        if matrix != e.matrix:
            raise ValueError(f"{e.name}: the plan is for {_text(e.matrix)}, the model has {_text(matrix)}")
        if e.rank is None and e.rule is None:
            continue
        if e.layer == "":
            raise ValueError("the model itself is the layer to replace; wrap it in an nn.Sequential")
        if finite:
            check_values(e.name, module.get_parameter(e.matrix.weight))


def _text(matrix: Matrix | None) -> str:
    if matrix is None:
        return "no such weight"
    blocks = f" in {matrix.blocks} blocks" if matrix.blocks > 1 else ""
    return f"a weight of {'×'.join(map(str, matrix.shape))}{blocks} with{'out' * (not matrix.bias)} a bias"


def check_hooks(name: str, module: nn.Module, replaced: list[str]) -> None:
    """Raise ValueError for hooks that depend on the replaced parameters or on the state dict."""
    for child in module.modules():
        for hooks in HOOKS:
            if hooks not in CALL_HOOKS and getattr(child, hooks):
                raise ValueError(
                    f"{name}: its hooks ({hooks.strip('_')}) cannot be moved to the new layer; remove them"
                )
        if child is not module and any(getattr(child, hooks, None) for hooks in CALL_HOOKS):
            raise ValueError(f"{name}: hooks of its children cannot be moved to the new layer; remove them")
    for label in replaced:
        parameter = module.get_parameter(label)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name}.{label}: its gradient hooks cannot be moved to the new parameter; remove them"
            )
