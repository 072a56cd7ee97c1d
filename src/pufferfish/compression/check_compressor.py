"""`check_compressor`: what every compression method has to hold, as a test for yours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .aggregator import Aggregator
from .batch import Batch
from .method import Method
from .settings import has_memory
from .store import MEMORY
from .transport import Coming, Simulated

#: Two of one shape, one of another, and two that are exempt unless all are compressed.
_SHAPES = {
    "a.weight": (24, 36),
    "b.weight": (24, 36),
    "c.weight": (16, 3, 5, 5),
    "a.bias": (24,),
    "scale": (),
}
_STEPS = 4

Gradients = list[dict[str, Tensor]]


def check_compressor(
    method: Method, *, sizes: tuple[int, ...] = (1, 2, 3, 4), draws: int = 200, device: str = "cpu"
) -> None:
    """Run our property tests on a method, with simulated workers.

    It must give the same bits on all workers, leave its input and the global random generators alone, keep
    what its `kind` says (contraction: no rest longer than x; unbiased: right on average; …), lose nothing
    between what is applied and what its memories hold, take zeros, empty, 0-d and one-element tensors, keep
    nothing of a step that is not finite, and go on from a saved state as if it had never stopped.

    A second memory, at the owners of shards, is looked for in `turn.state["owner"]`: (b, s) as `turn.shards` cuts,
    in units of the mean. The method names it in `in_units`.

    Args:
        sizes: numbers of workers.
        draws: random draws for what holds on average only.
        device: where the gradients are.

    Raises:
        AssertionError: says what does not hold.

    >>> from pufferfish.compression import TopK
    >>> check_compressor(TopK(k=0.1))
    """
    before = torch.get_rng_state()
    for size in sizes:
        for smallest in (0, 500):
            _same_everywhere(method, size, smallest, device)
        _conserves(method, size, device)
        _takes_anything(method, size, device)
        _survives_nonfinite(method, size, device)
        _resumes(method, size, device)
    _keeps_its_kind(method, draws, device)
    assert torch.equal(before, torch.get_rng_state()), f"{method}: draws from the global random generator"


class _Weighed(Simulated):
    """Counts the bytes of what it is handed, on its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight = 0

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        self.weight += mine[0].numel() * mine[0].element_size()
        return super()._sum(mine)

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        assert len({x.numel() for x in mine}) == 1, "workers gather messages of different sizes"
        self.weight += mine[0].numel() * mine[0].element_size()
        return super()._gather(mine)

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        for pieces in zip(*mine, strict=True):
            assert len({x.numel() for x in pieces}) == 1, "an owner is sent pieces of different sizes"
        self.weight += sum(x.numel() * x.element_size() for x in mine[0])
        return super()._scatter(mine)


def gradients(size: int, step: int = 0, device: str = "cpu") -> Gradients:
    """Random ones, for each of `size` workers; they agree by and large, as gradients do.

    >>> [g["scale"].shape for g in gradients(2)]
    [torch.Size([]), torch.Size([])]
    """
    stream = torch.Generator().manual_seed(1000 + step)
    common = {name: torch.randn(shape, generator=stream) for name, shape in _SHAPES.items()}
    return [
        {name: (x + torch.randn(x.shape, generator=stream)).to(device) for name, x in common.items()}
        for _ in range(size)
    ]


def _same_everywhere(method: Method, size: int, smallest: int, device: str) -> None:
    transport = _Weighed(size)
    aggregator = Aggregator(method, transport, smallest=smallest)
    for step in range(_STEPS):
        given = gradients(size, step, device)
        means = aggregator.together(given)
        for mine, untouched in zip(given, gradients(size, step, device), strict=True):
            for name, g in mine.items():
                assert torch.equal(g, untouched[name]), f"{method}: changes the gradient it is given"
        for rank, mean in enumerate(means):
            for name, shape in _SHAPES.items():
                assert mean[name].shape == shape, f"{method}: the mean of {name} has another shape"
                assert torch.equal(mean[name], means[0][name]), (
                    f"{method}: ranks 0 and {rank} differ in {name}"
                )
    handed = sum(aggregator.meter.handed.values())
    assert handed == transport.weight, f"{method}: {transport.weight} bytes sent, {handed} counted"


def _conserves(method: Method, size: int, device: str) -> None:
    """All gradients so far = what was applied + what the memories hold, on average over the workers."""
    if not has_memory(method, None):
        return
    aggregator = Aggregator(method, Simulated(size), smallest=0)
    balance = {name: torch.zeros(shape, device=device) for name, shape in _SHAPES.items()}
    for step in range(_STEPS):
        given = gradients(size, step, device)
        mean = aggregator.together(given)[0]
        for name, left in balance.items():
            left += sum(g[name] for g in given) / size - mean[name]
    kept = aggregator.state_dict()["own"]
    for name, left in balance.items():
        held = torch.zeros_like(left).flatten()
        for own in kept:
            held += own.get(name, {}).get(MEMORY, torch.zeros_like(left)).flatten() / size
        if "owner" in kept[0].get(name, {}):
            held += torch.cat([own[name]["owner"].flatten() for own in kept])[: held.numel()]
        error = (left.flatten() - held).norm() / max(1.0, float(left.norm()))
        assert error < 1e-4, (
            f"{method}: {name} has lost or gained {error:.2g} of what it was given, {size} workers"
        )


def _takes_anything(method: Method, size: int, device: str) -> None:
    """Zeros, nothing, one number, a single row; in steps before and after ordinary ones."""
    shapes = {"zero": (24, 36), "empty": (0, 4), "0-d": (), "one": (1, 1), "row": (1, 7), "column": (7, 1)}
    aggregator = Aggregator(method, Simulated(size), smallest=0)
    for step in range(3):
        stream = torch.Generator().manual_seed(step)
        given = [
            {
                n: torch.randn(s, generator=stream).to(device) * (n != "zero" or step == 1)
                for n, s in shapes.items()
            }
            for _ in range(size)
        ]
        mean = aggregator.together(given)[0]
        for name, shape in shapes.items():
            assert mean[name].shape == shape, f"{method}: {name} comes back as {tuple(mean[name].shape)}"
            assert mean[name].isfinite().all(), f"{method}: {name} is not finite in step {step}"
        if step != 1:
            assert not mean["zero"].any(), (
                f"{method}: makes something of gradients that are zero on all workers"
            )


def _survives_nonfinite(method: Method, size: int, device: str) -> None:
    """A bad step leaves no trace but its number, whatever was bad."""
    aggregator = Aggregator(method, Simulated(size), smallest=0)
    for step, value in enumerate((math.nan, 1.0, math.inf, -math.inf, 1e30, 1.0)):
        kept = _flat(aggregator.state_dict())
        given = gradients(size, step, device)
        if value != 1:
            given[-1]["b.weight"][3, 4] = value
        for mean in aggregator.together(given):
            for name, x in mean.items():
                right = x.isfinite() if value == 1 else x.isnan()
                assert right.all(), f"{method}: {name} after {value} on one worker"
        if value != 1:
            after = _flat(aggregator.state_dict())
            for path, x in after.items():
                old = kept.get(path, torch.zeros_like(x))
                assert torch.equal(x, old), f"{method}: {path} was changed by a step with {value}"


def _resumes(method: Method, size: int, device: str) -> None:
    whole, resumed = (Aggregator(method, Simulated(size), smallest=0) for _ in range(2))
    for step in range(2 * _STEPS):
        if step == _STEPS:
            resumed.load_state_dict(whole.state_dict())
        mean = whole.together(gradients(size, step, device))
        if step >= _STEPS:
            # In another order, which must not matter.
            given = [dict(reversed(g.items())) for g in gradients(size, step, device)]
            again = resumed.together(given)
            for name in _SHAPES:
                assert torch.equal(mean[0][name], again[0][name]), (
                    f"{method}: {name} differs after resuming in step {step}, {size} workers"
                )


def _keeps_its_kind(method: Method, draws: int, device: str) -> None:
    rests, means, targets = [], [], []
    for draw in range(draws if method.kind in ("contraction", "unbiased") else 2):
        aggregator = Aggregator(method, Simulated(2), seed=draw, smallest=0)
        given = gradients(2, draw if method.kind == "contraction" else 0, device)
        result = aggregator.together(given)[0]
        batches = list(aggregator.kept.stores[0].kept)
        means.append(_vector(result, batches, method))
        targets.append(_vector({n: (given[0][n] + given[1][n]) / 2 for n in _SHAPES}, batches, method))
        if method.kind == "contraction":
            rest = {n: x[MEMORY] for n, x in aggregator.kept.stores[0].named().items() if MEMORY in x}
            rests.append(
                float(_vector(rest, batches, method).norm() / _vector(given[0], batches, method).norm())
            )
    mean, target = torch.stack(means), torch.stack(targets)
    error = float((mean - target).norm() / target.norm())
    if method.kind == "contraction":
        average = sum(r * r for r in rests) / len(rests)
        assert average < 1, f"{method}: is no contraction; ‖rest‖²/‖x‖² is {average:.4g} on average"
    elif method.kind == "unbiased":
        along = (mean @ target[0]) / target[0].square().sum()  # 1 on average
        off = abs(float(along.mean()) - 1) / max(float(along.std()) / draws**0.5, 1e-6)
        assert off < 5, (
            f"{method}: is biased; {along.mean():.4g} of the mean comes through, {off:.1f} σ from 1"
        )
        spread = float(mean.var(0).sum()) / draws
        missed = float((mean.mean(0) - target[0]).square().sum())
        assert missed < 2 * spread + 1e-10, (
            f"{method}: is biased; its average is {missed / spread:.2g} σ² off"
        )
    elif method.kind == "exact":
        assert error < 1e-6, f"{method}: is not exact; off by {error:.2g}"
    elif method.kind == "rounding":
        assert error < 1e-2, f"{method}: rounds by {error:.2g}"
    elif method.kind == "vote":
        assert (mean.abs() == 1).all(), f"{method}: a vote is ±1"
        agree = _agreeing(given, batches, method)
        assert (mean[-1][agree] == target[-1][agree].sign()).all(), (
            f"{method}: unanimous votes are not followed"
        )


def _agreeing(given: Gradients, batches: list[Batch], method: Method) -> Tensor:
    return _vector({n: (given[0][n] * given[1][n]) for n in _SHAPES}, batches, method) > 0


def _vector(named: dict[str, Tensor], batches: list[Batch], method: Method) -> Tensor:
    """What goes through the method, not around it, as one vector."""
    names = [name for batch in batches if batch.method == method for name in batch.names]
    assert names, f"{method}: fits no tensor; there are {_SHAPES}"
    return torch.cat([named[name].flatten() for name in names])


def _flat(state: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of a state dict by their paths."""
    return dict(_leaves(state, path))


def _leaves(x: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield path, x
    elif isinstance(x, dict | list):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _leaves(value, f"{path}/{key}")
