"""`factorize_state_dict` and `merge_state_dict`: `factorize_` and `merge_` for state dicts, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers import FactorMap, Matrix
from ..layers.names import own_keys
from ..planning import svd
from ..planning.entries import Entry
from ..planning.plan import Plan, check_is_plan, matrix_spectrum
from ..planning.rules import apply_rules
from ..planning.text import track


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
    keys = keys_by_name(source)
    spectra = {}
    for e in track(
        [e for e in plan.entries if e.rule is not None and e.matrix is not None], "choosing ranks"
    ):
        assert e.matrix is not None
        spectra[e.name] = matrix_spectrum(e, source.get(_find(keys, e, e.matrix.weight)))
    return apply_rules(plan, spectra) if spectra else plan


def factorized(source: Source, plan: Plan) -> list[LazyTensor]:
    """The low-rank state dict, in the order of the dense one. Checks names and shapes; computes nothing yet."""
    keys = keys_by_name(source)
    layers = {key: layer for layer in factorized_layers(plan, keys) for key in layer.dense_keys.values()}
    tensors: list[LazyTensor] = []
    for key, (shape, dtype) in source.shapes.items():
        if key not in layers:
            tensors.append(LazyTensor(key, shape, dtype, lambda key=key: source.get(key)))  # type: ignore[misc]
            continue
        layer, dense = layers[key], key.removeprefix(layers[key].prefix)
        for e in layer.entries:
            x = e.matrix
            assert x is not None
            if x.weight == dense and e.rank is not None:
                _check_shape(e, x, shape, key)
                tensors += _pair(source, key, layer, e, dtype)
            for name, index, target in x.copied_slices(e.rank is not None):
                if name == dense:
                    part = torch.empty(shape, device="meta")[index].shape
                    take = lambda key=key, index=index: source.get(key)[index]  # noqa: E731
                    tensors.append(LazyTensor(layer.key(target), part, dtype, take))
    return tensors


def merged(source: Source, plan: Plan) -> list[LazyTensor]:
    """The dense state dict, in the order of the low-rank one. Checks names; computes nothing yet."""
    keys = keys_by_name(source)
    tensors: list[LazyTensor] = []
    owners: dict[str, tuple[FactorizedLayer, str]] = {}
    for layer in factorized_layers(plan, keys, low_rank=True):
        for dense, parts in layer.mapping.targets.items():
            owners |= {layer.key(part): (layer, dense) for part in parts}
    done = set()
    for key, (shape, dtype) in source.shapes.items():
        if key not in owners:
            tensors.append(LazyTensor(key, shape, dtype, lambda key=key: source.get(key)))  # type: ignore[misc]
            continue
        layer, dense = owners[key]
        name = layer.key(dense)
        if name in done:
            continue
        done.add(name)
        whole = layer.dense_shape(dense)
        make = lambda layer=layer, dense=dense, dtype=dtype: layer.dense_tensor(source, dense, dtype)  # noqa: E731
        tensors.append(LazyTensor(name, whole, dtype, make))
    return tensors


@dataclass(frozen=True)
class FactorizedLayer:
    """One layer of the plan that is or becomes low-rank, and its keys in the state dict."""

    prefix: str  # of its keys, including those of wrappers
    entries: list[Entry]
    dense_keys: dict[str, str]  # dense parameter → key, if the state dict is dense

    def key(self, name: str) -> str:
        return self.prefix + name

    @property
    def mapping(self) -> FactorMap:
        matrices = [e.matrix for e in self.entries if e.matrix is not None]
        ranks = {e.matrix.name: e.rank for e in self.entries if e.matrix and e.rank}
        return FactorMap(matrices, ranks, {}, {})

    def dense_shape(self, dense: str) -> torch.Size:
        shapes = [s for x in self.mapping.matrices if (s := x.least_shape(dense))]
        return torch.Size(map(max, zip(*shapes, strict=True)))

    def dense_tensor(self, source: Source, dense: str, dtype: torch.dtype) -> Tensor:
        def product(x: Matrix) -> Tensor:
            return x.product_fp32(source.get(self.key(x.down)), source.get(self.key(x.up)))

        whole = torch.empty(self.dense_shape(dense), dtype=dtype)
        return self.mapping.assemble(dense, whole, product, lambda part: source.get(self.key(part)))


def keys_by_name(source: Source) -> dict[str, str]:
    """Keys of the state dict by their names without those of wrappers."""
    return {own: key for key, own in own_keys(source.shapes).items()}


def _find(keys: Mapping[str, str], e: Entry, name: str) -> str:
    own = f"{e.layer}.{name}" if e.layer else name
    if own not in keys:
        raise ValueError(f"{e.name}: the checkpoint has no tensor {own!r}; pass the plan of this model")
    return keys[own]


def factorized_layers(
    plan: Plan, keys: Mapping[str, str], low_rank: bool = False
) -> Iterator[FactorizedLayer]:
    """Layers with a rank in the plan.

    Args:
        keys: from `keys_by_name`.
        low_rank: whether the state dict is low-rank or dense.
    """
    by_layer: dict[str, list[Entry]] = {}
    layers = {e.layer for e in plan.entries if e.rank is not None}
    for e in plan.entries:
        if e.layer in layers and e.matrix is not None:
            by_layer.setdefault(e.layer, []).append(e)
    for entries in by_layer.values():
        first = next(e for e in entries if e.rank is not None)
        x = first.matrix
        assert x is not None
        anchor = x.down if low_rank else x.weight
        prefix = _find(keys, first, anchor).removesuffix(anchor)
        dense_keys: dict[str, str] = {}
        for e in entries:
            x = e.matrix
            assert x is not None
            factorized = e.rank is not None
            if low_rank:
                names = [x.down, x.up] if factorized else []
                names += [target for *_, target in x.copied_slices(factorized)]
            else:
                names = [x.weight] + ([x.bias] if x.bias else [])
            dense_keys |= {name: _find(keys, e, name) for name in names}
        yield FactorizedLayer(prefix, entries, {} if low_rank else dense_keys)


def _check_shape(e: Entry, x: Matrix, shape: torch.Size, key: str) -> None:
    if len(shape) != len(x.shape) or torch.empty(shape, device="meta")[x.index].shape != x.shape:
        shape_text, planned = ("×".join(map(str, s)) for s in (shape, x.shape))
        raise ValueError(
            f"{e.name}: the plan is for a weight of {planned}, but {key!r} of the checkpoint is {shape_text}"
        )


def _pair(source: Source, key: str, layer: FactorizedLayer, e: Entry, dtype: torch.dtype) -> list[LazyTensor]:
    """down.weight and up.weight from one SVD, which is computed for the first and freed with the second."""
    x, r = e.matrix, e.rank
    assert x is not None and r is not None  # noqa: PT018
    held: list[Tensor] = []

    def down() -> Tensor:
        weight = source.get(key)
        svd.check_values(e.name, weight)
        U, V, _ = svd.split(x.to_matrix(weight), r)
        first, second = x.from_factors(U, V)
        held.append(second.to(dtype))
        return first.to(dtype)

    shapes = x.from_factors(
        torch.empty(x.blocks, x.m, r, device="meta"), torch.empty(x.blocks, r, x.n, device="meta")
    )
    return [
        LazyTensor(layer.key(x.down), shapes[0].shape, dtype, down),
        LazyTensor(layer.key(x.up), shapes[1].shape, dtype, held.pop),
    ]
