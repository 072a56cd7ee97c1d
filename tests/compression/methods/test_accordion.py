"""Accordion: light or strong compression, chosen for each tensor by its own gradients."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression import (
    BFloat16,
    EFSignSGD,
    Float16,
    Int4,
    Method,
    NoCompression,
    PowerSGD,
    Settings,
    SignSGD,
    Simulated,
    TopK,
)
from pufferfish.compression.check_compressor import check_compressor
from pufferfish.compression.methods.accordion import Accordion
from pufferfish.compression.methods.blocks import BlockInt8
from pufferfish.compression.methods.dgc import DGC

PAIRS = [
    Accordion(PowerSGD(3), PowerSGD(1), every=2),
    Accordion(NoCompression(), TopK(k=0.1), every=1),
    Accordion(TopK(k=0.5), PowerSGD(1), every=2),
]


@pytest.mark.parametrize("method", PAIRS)
def test_properties(method: Accordion) -> None:
    check_compressor(method, sizes=(1, 3), draws=50)


@pytest.mark.parametrize("light", [NoCompression(), BFloat16(), Float16()])
def test_light_where_the_gradient_moves(light: Method) -> None:
    """One tensor stays, the other doubles in every period."""
    method = Accordion(light, TopK(k=1), every=3)
    base = normal(2, 2, 4, workers=1)[0]
    states: list[State] = [{}, {}]
    dense = []
    for step in range(9):
        g = base * torch.tensor([1.0, 2.0 ** (step // 3)])[:, None, None]
        mean = drive(method, [g, g], states, step).mean
        dense.append([bool((x != 0).sum() > 1) for x in mean])
        torch.testing.assert_close(mean[dense[-1]], g[dense[-1]], rtol=0.01, atol=0)
    assert dense == [[True, True]] * 6 + [[False, True]] * 3


def test_light_again_when_the_learning_rate_falls() -> None:
    """A fall to half of the highest rate counts; a rise does not, nor does an unknown rate."""
    two = Simulated(Settings(Accordion(NoCompression(), TopK(k=1), every=1), smallest=0), 2)
    g = {"w": torch.tensor([[100.0, 1.0], [1.0, 1.0]])}  # so that its norm does not depend on the method
    rates = [0.1, 0.2, 0.4, 0.3, 0.2, 0.2, 0.0, 0.2, 0.15, 0.1]
    dense = []
    for rate in rates:
        mean = two.average([g, g], {"w": 1 / rate if rate else 0.0})[0]["w"]
        dense.append(bool((mean != 0).sum() > 1))
    assert dense == [True, True, False, False, True, True, False, False, False, True]


def test_decides_by_the_norm_of_the_sum() -> None:
    """Against a plain reference, with gradients that come and go."""
    every, change = 2, 0.5
    method = Accordion(NoCompression(), NoCompression(), every=every, change=change)
    states: list[State] = [{}]
    sums, before, light, seen = torch.zeros(4, 3, 2), [None] * 4, [True] * 4, set()
    for step in range(20):
        g = normal(4, 3, 2, workers=1, seed=step // 3)[0]
        drive(method, [g], states, step)
        sums += g
        if step % every == every - 1:
            for i in range(4):
                norm, last = float(sums[i].norm()), before[i]
                light[i] = last is None or abs(norm - last) >= change * last
                before[i] = norm
            sums = torch.zeros(4, 3, 2)
        assert states[0]["light"].tolist() == light
        seen.add(tuple(light))
    assert len(seen) > 3


@pytest.mark.parametrize("methods", [(PowerSGD(2), PowerSGD(1)), (BlockInt8(block=8), TopK(k=5))])
def test_each_tensor_continues_with_its_own_state(methods: tuple[Method, Method]) -> None:
    """A batch whose tensors are light and strong at different times gives the results of single tensors."""
    method = Accordion(*methods, every=2, change=0.3)

    def at(step: int) -> list[Tensor]:
        xs = normal(3, 8, 6, workers=2, seed=step // 4)
        grow = torch.tensor([1.0, 1.5 ** (step // 2 % 3), 3.0 ** (step // 6 % 2)])
        return [x * grow[:, None, None] for x in xs]

    together: list[State] = [{}, {}]
    alone: list[list[State]] = [[{}, {}] for _ in range(3)]
    for state in (together, *alone):  # no random start: names, and with them the streams, differ
        for mine in state:
            b = 3 if state is together else 1
            if isinstance(methods[0], PowerSGD):
                mine |= {f"{k}.Q": torch.eye(6, r).repeat(b, 1, 1) for k, r in (("low", 2), ("high", 1))}
                mine |= {"fresh": torch.zeros(b, 2, dtype=torch.bool)}
    seen = set()
    for step in range(16):
        xs = at(step)
        mean, rests, _ = drive(method, xs, together, step)
        for i in range(3):
            one = drive(method, [x[i : i + 1] for x in xs], alone[i], step)
            torch.testing.assert_close(mean[i], one.mean[0])
            torch.testing.assert_close(rests[1][i], one.rests[1][0])
        seen.add(tuple(together[0]["light"].tolist()))
    assert len(seen) > 2


@pytest.mark.parametrize("inner", [Int4(), EFSignSGD()], ids=lambda m: type(m).__name__)
def test_nothing_is_lost_when_another_method_takes_over(inner: Method) -> None:
    """Both methods keep errors of the shards that a worker owns."""
    two = Simulated(Settings(Accordion(inner, inner, every=1), smallest=0), 2)
    given, applied = torch.zeros(32, 32), torch.zeros(32, 32)
    for step in range(5):
        if step == 4:
            two.use(Settings(NoCompression()))
        gs = normal(32, 32, workers=2, seed=step // 3)
        given += sum(gs) / 2
        applied += two.average([{"w": g} for g in gs])[0]["w"]
    torch.testing.assert_close(applied, given, rtol=0, atol=1e-4)


def test_settings() -> None:
    with pytest.raises(TypeError, match="low="):
        Accordion(PowerSGD, PowerSGD(1), every=5)
    with pytest.raises(ValueError, match="Accordion: DGC"):
        Accordion(TopK(), DGC(), every=5)
    with pytest.raises(ValueError, match="votes"):
        Accordion(TopK(), SignSGD(), every=5)
    with pytest.raises(ValueError, match="every=0"):
        Accordion(TopK(0.1), TopK(), every=0)
    with pytest.raises(ValueError, match="change="):
        Accordion(TopK(0.1), TopK(), every=1, change=0.0)
    assert Accordion(NoCompression(), NoCompression(), every=1).kind == "exact"
