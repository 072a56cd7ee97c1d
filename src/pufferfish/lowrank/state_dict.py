"""`factorize_state_dict` and `merge_state_dict`: `factorize_` and `merge_` for state dicts, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..layers.matrix import Part, product
from ..layers.names import join_name, own_keys
from ..planning import svd
from ..planning.plan import Plan, check_is_plan
from ..planning.planner import apply_rules, matrix_spectrum
from ..planning.progress import track

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class Source:
    """A state dict that need not be in memory: `get` reads one tensor."""

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    get: Callable[[str], Tensor]

    @staticmethod
    def of(state_dict: Mapping[str, Tensor]) -> Source:
        return Source({k: (v.shape, v.dtype) for k, v in state_dict.items()}, state_dict.__getitem__)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a converted state dict, computed by `make`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def factorize_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Make the state dict of a dense model low-rank, as `factorize_` does.

    Args:
        plan: From `pufferfish.plan`. Rank rules in it are resolved with the weights.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> low_rank = pf.factorize_state_dict(model.state_dict(), pf.plan(model))
    >>> {name: tuple(tensor.shape) for name, tensor in low_rank.items()}
    {'0.down.weight': (16, 64), '0.up.weight': (64, 16), '0.up.bias': (64,)}
    """
    check_is_plan(plan, "factorize_state_dict")
    source = Source.of(state_dict)
    return {tensor.name: tensor.make() for tensor in factorized(source, resolve(source, plan))}


def merge_state_dict(state_dict: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Make the state dict of a low-rank model dense again, as `merge_` does.

    Args:
        plan: With all ranks.

    >>> import pufferfish as pf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> plan = pf.plan(model)
    >>> list(merge_state_dict(pf.factorize_state_dict(model.state_dict(), plan), plan))
    ['0.weight', '0.bias']
    """
    check_is_plan(plan, "merge_state_dict")
    return {tensor.name: tensor.make() for tensor in merged(Source.of(state_dict), plan)}


def resolve(source: Source, plan: Plan) -> Plan:
    """The plan with all ranks; rank rules are resolved with the weights of the state dict."""
    keys = {own: key for key, own in own_keys(source.shapes).items()}
    spectra = {}
    for e in track(
        [e for e in plan.entries if e.rule is not None and e.matrix is not None], "choosing ranks"
    ):
        assert e.matrix is not None
        name = join_name(e.layer, e.matrix.weight)
        if name not in keys:
            raise ValueError(f"{e.name}: the checkpoint has no tensor {name!r}; pass the plan of this model")
        spectra[e.name] = matrix_spectrum(e, source.get(keys[name]))
    return apply_rules(plan, spectra) if spectra else plan


def factorized(source: Source, plan: Plan) -> list[LazyTensor]:
    """The low-rank state dict, in the order of the dense one. Checks names and shapes; computes nothing yet."""
    factor_map, own = plan.factor_map, own_keys(source.shapes)
    keys = {name: key for key, name in own.items()}
    for name, parts in factor_map.parts.items():
        for part in parts:
            _check(part, source, keys, name)
    tensors: list[LazyTensor] = []
    for key, name in own.items():
        if name not in factor_map.parts:
            tensors += _unchanged(key, source)
            continue

        def split(get: Get, key: str = key, name: str = name) -> dict[str, Tensor]:
            value, layer = get(key), factor_map.parts[name][0].layer
            pieces = factor_map.split(name, value, _factors)
            return {_key(key, layer, name, target): x.to(value.dtype) for target, x in pieces}

        tensors += together(split, source)
    return tensors


def merged(source: Source, plan: Plan) -> list[LazyTensor]:
    """The dense state dict, in the order of the low-rank one. Checks names; computes nothing yet."""
    factor_map, own = plan.factor_map, own_keys(source.shapes)
    keys = {name: key for key, name in own.items()}
    dense = {target: name for name, targets in factor_map.targets.items() for target in targets}
    for target, name in dense.items():
        _check(factor_map.parts[name][0], source, keys, target)
    tensors: list[LazyTensor] = []
    done: set[str] = set()
    for key, target in own.items():
        name = dense.get(target, "")
        if not name:
            tensors += _unchanged(key, source)
        elif name not in done:
            done.add(name)

            def join(get: Get, key: str = key, target: str = target, name: str = name) -> dict[str, Tensor]:
                layer = factor_map.parts[name][0].layer
                out = get(key).new_empty(factor_map.shape(name))
                whole = factor_map.join(name, lambda part: get(keys[part]), product, out)
                return {_key(key, layer, target, name): whole}

            tensors += together(join, source)
    return tensors


def together(convert: Callable[[Get], dict[str, Tensor]], source: Source) -> list[LazyTensor]:
    """The tensors that `convert` makes of some tensors of the source.

    Their shapes are those of a run on the meta device. All are computed for the first that is asked for, and each is
    forgotten when it is taken.
    """
    held: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in held:
            held.update(convert(source.get))
        return held.pop(name)

    on_meta = convert(lambda key: _meta(*source.shapes[key]))
    return [LazyTensor(name, x.shape, x.dtype, partial(make, name)) for name, x in on_meta.items()]


def _unchanged(key: str, source: Source) -> list[LazyTensor]:
    return [LazyTensor(key, *source.shapes[key], partial(source.get, key))]


def _factors(part: Part, W: Tensor) -> tuple[Tensor, Tensor]:
    assert part.rank is not None
    if W.is_meta:
        return W.new_empty(*W.shape[:2], part.rank), W.new_empty(len(W), part.rank, W.shape[2])
    svd.check_values(part.name, W)
    return svd.split(W, part.rank)[:2]


def _key(key: str, layer: str, name: str, new: str) -> str:
    """Key of the tensor `new` of a layer, where that of its tensor `name` is `key`, with the prefixes of its wrappers."""
    return key.removesuffix(name.removeprefix(f"{layer}.")) + new.removeprefix(f"{layer}.")


def _check(part: Part, source: Source, keys: Mapping[str, str], name: str) -> None:
    """Raise ValueError unless the state dict has the tensor `name`, a dense one with a shape of which `part` is a part."""
    if name not in keys:
        raise ValueError(f"{part.name}: the checkpoint has no tensor {name!r}; pass the plan of this model")
    x, (shape, _) = part.matrix, source.shapes[keys[name]]
    if part.rank is None or name != part.source:
        return
    if len(shape) != len(x.shape) or torch.empty(shape, device="meta")[part.index].shape != x.shape:
        shape_text, planned = ("×".join(map(str, s)) for s in (shape, x.shape))
        raise ValueError(
            f"{part.name}: the plan is for a weight of {planned}, but {keys[name]!r} of the checkpoint is {shape_text}"
        )


def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
