"""`check_compressor`: property tests that every compression method passes, for methods of your own."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .engine import Batch
from .method import Method
from .settings import Settings
from .simulated import Simulated
from .state import ERROR

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
    """Run property tests on a method, with simulated workers.

    The method must give the same bits on all workers; leave its input and the global random generators alone; have an error
    of its `kind` (contraction: the rest is not longer than x; unbiased: right on average; …); lose nothing between
    what is applied and what error feedback holds; accept zeros, empty, 0-d and one-element tensors; keep nothing of a
    step that is not finite; and continue from a saved state as if it had not stopped.

    A second error feedback, at the owners of shards, is expected in `ctx.state["owner"]`: (b, s) as `ctx.shards` cuts,
    in units of the mean. The method's table `state` lists it as `Kept("divided", follows="units")`. A method that lets
    error feedback fade loses a part of it: test it with a setting that does not, such as `SparseLoCo(decay=1)`.

    Args:
        method: The method to test.
        sizes: Numbers of workers.
        draws: Random draws for properties that hold on average only.
        device: Device of the gradients.

    Raises:
        AssertionError: Says which property does not hold.

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


def gradients(size: int, step: int = 0, device: str = "cpu") -> Gradients:
    """Random gradients for each of `size` workers, which are correlated, as gradients are.

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
    simulated = Simulated(Settings(method, smallest=smallest), size)
    for step in range(_STEPS):
        given = gradients(size, step, device)
        means = simulated.average(given)
        for mine, untouched in zip(given, gradients(size, step, device), strict=True):
            for name, g in mine.items():
                assert torch.equal(g, untouched[name]), f"{method}: changes the gradient it is given"
        for worker, mean in enumerate(means):
            for name, shape in _SHAPES.items():
                assert mean[name].shape == shape, f"{method}: the mean of {name} does not have its shape"
                assert torch.equal(mean[name], means[0][name]), (
                    f"{method}: workers 0 and {worker} differ in {name}"
                )


def _conserves(method: Method, size: int, device: str) -> None:
    """All gradients so far = what was applied + what error feedback holds, on average over the workers."""
    if not Settings(method).has_error_feedback(method):
        return
    simulated = Simulated(Settings(method, smallest=0), size)
    balance = {name: torch.zeros(shape, device=device) for name, shape in _SHAPES.items()}
    for step in range(_STEPS):
        given = gradients(size, step, device)
        mean = simulated.average(given)[0]
        for name, left in balance.items():
            left += sum(g[name] for g in given) / size - mean[name]
    states = [engine.state_dict()["own"] for engine in simulated.engines]
    for name, left in balance.items():
        held = torch.zeros_like(left).flatten()
        for own in states:
            held += own.get(name, {}).get(ERROR, torch.zeros_like(left)).flatten() / size
        if "owner" in states[0].get(name, {}):
            held += torch.cat([own[name]["owner"].flatten() for own in states])[: held.numel()]
        error = (left.flatten() - held).norm() / max(1.0, float(left.norm()))
        assert error < 1e-4, f"{method}: {name} lost or gained {error:.2g} of its gradients, {size} workers"


def _takes_anything(method: Method, size: int, device: str) -> None:
    """Zeros, empty tensors, one number, a single row; in steps before and after ordinary ones."""
    shapes = {"zero": (24, 36), "empty": (0, 4), "0-d": (), "one": (1, 1), "row": (1, 7), "column": (7, 1)}
    simulated = Simulated(Settings(method, smallest=0), size)
    for step in range(3):
        stream = torch.Generator().manual_seed(step)
        given = [
            {
                n: torch.randn(s, generator=stream).to(device) * (n != "zero" or step == 1)
                for n, s in shapes.items()
            }
            for _ in range(size)
        ]
        mean = simulated.average(given)[0]
        for name, shape in shapes.items():
            assert mean[name].shape == shape, (
                f"{method}: the mean of {name} has the shape {tuple(mean[name].shape)}, not {shape}"
            )
            assert mean[name].isfinite().all(), f"{method}: {name} is not finite in step {step}"
        if step != 1:
            assert not mean["zero"].any(), (
                f"{method}: the mean of gradients that are zero on all workers is not zero"
            )


def _survives_nonfinite(method: Method, size: int, device: str) -> None:
    """A step that is not finite changes nothing but the step count."""
    simulated = Simulated(Settings(method, smallest=0), size)
    for step, value in enumerate((math.nan, 1.0, math.inf, -math.inf, 1e30, 1.0)):
        kept = dict(_leaves(simulated.state_dict(), ""))
        given = gradients(size, step, device)
        if value != 1:
            given[-1]["b.weight"][3, 4] = value
        for mean in simulated.average(given):
            for name, x in mean.items():
                right, state = (x.isfinite(), "finite") if value == 1 else (x.isnan(), "NaN")
                assert right.all(), f"{method}: the mean of {name} is not {state}, with {value} on one worker"
        if value != 1:
            for path, x in _leaves(simulated.state_dict(), ""):
                old = kept.get(path, torch.zeros_like(x))
                assert torch.equal(x, old), f"{method}: {path} was changed by a step with {value}"


def _resumes(method: Method, size: int, device: str) -> None:
    whole, resumed = (Simulated(Settings(method, smallest=0), size) for _ in range(2))
    for step in range(2 * _STEPS):
        if step == _STEPS:
            resumed.load_state_dict(whole.state_dict())
        mean = whole.average(gradients(size, step, device))
        if step >= _STEPS:
            # In another order, which must not matter.
            given = [dict(reversed(g.items())) for g in gradients(size, step, device)]
            again = resumed.average(given)
            for name in _SHAPES:
                assert torch.equal(mean[0][name], again[0][name]), (
                    f"{method}: {name} differs after resuming in step {step}, {size} workers"
                )


def _keeps_its_kind(method: Method, draws: int, device: str) -> None:
    rests, means, targets = [], [], []
    for draw in range(draws if method.kind in ("contraction", "unbiased") else 2):
        simulated = Simulated(Settings(method, seed=draw, smallest=0), 2)
        given = gradients(2, draw if method.kind == "contraction" else 0, device)
        result = simulated.average(given)[0]
        batches = simulated.engines[0].state.batches
        means.append(_vector(result, batches, method))
        targets.append(_vector({n: (given[0][n] + given[1][n]) / 2 for n in _SHAPES}, batches, method))
        if method.kind == "contraction":
            named = simulated.engines[0].state.named()
            rest = {n: named.get(n, {}).get(ERROR, torch.zeros_like(x)) for n, x in given[0].items()}
            rests.append(
                float(_vector(rest, batches, method).norm() / _vector(given[0], batches, method).norm())
            )
    mean, target = torch.stack(means), torch.stack(targets)
    error = float((mean - target).norm() / target.norm())
    if method.kind == "contraction":
        average = sum(r * r for r in rests) / len(rests)
        assert average < 1, f"{method}: is not a contraction; ‖rest‖²/‖x‖² is {average:.4g} on average"
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
        assert error < 1e-2, f"{method}: rounds too coarsely; off by {error:.2g}"
    elif method.kind == "vote":
        assert (mean.abs() == 1).all(), f"{method}: a vote is not ±1"
        agree = _vector({n: (given[0][n] * given[1][n]) for n in _SHAPES}, batches, method) > 0
        assert (mean[-1][agree] == target[-1][agree].sign()).all(), (
            f"{method}: unanimous votes are not followed"
        )


def _vector(named: dict[str, Tensor], batches: list[Batch], method: Method) -> Tensor:
    """The tensors that the method compresses, as one vector."""
    names = [name for batch in batches if batch.policy == method for name in batch.names]
    assert names, f"{method}: compresses none of the test tensors, {_SHAPES}"
    return torch.cat([named[name].flatten() for name in names])


def _leaves(x: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict, with their paths."""
    if isinstance(x, Tensor):
        yield path, x
    elif isinstance(x, dict | list):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _leaves(value, f"{path}/{key}")
