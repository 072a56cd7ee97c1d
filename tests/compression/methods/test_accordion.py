"""Accordion: light or strong compression, chosen for each tensor by its own gradients."""

import pytest
import torch

from driver import normal
from pufferfish.compression import (
    DGC,
    Accordion,
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


@pytest.mark.parametrize(
    "method",
    [
        Accordion(PowerSGD(4, start=1), PowerSGD(1), every=2),
        Accordion(NoCompression(), TopK(k=0.1), every=1),
        Accordion(TopK(k=0.5), PowerSGD(1), every=2),
    ],
)
def test_properties(method: Accordion) -> None:
    check_compressor(method, sizes=(1, 3), draws=50)


@pytest.mark.parametrize("light", [NoCompression(), BFloat16(), Float16()])
def test_light_where_the_gradient_moves(light: Method) -> None:
    """One tensor stays, the other doubles in every period; both are resumed in between."""
    settings = Settings(Accordion(light, TopK(k=1), every=3), smallest=0)
    two = Simulated(settings, 2)
    base = normal(2, 2, 4, workers=1)[0]
    dense = []
    for step in range(9):
        if step in (4, 7):
            saved, two = two.state_dict(), Simulated(settings, 2)
            two.load_state_dict(saved)
        g = {"stays": base[0], "grows": base[1] * 2.0 ** (step // 3)}
        mean = two.average([g, g])[0]
        dense.append([bool((x != 0).sum() > 1) for x in mean.values()])
        if all(dense[-1]):
            torch.testing.assert_close(mean, g, rtol=0.01, atol=0)
    assert dense == [[True, True]] * 6 + [[False, True]] * 3


def test_light_again_after_the_learning_rate_has_fallen() -> None:
    """A fall to half of the highest rate counts; a rise does not, nor does an unknown rate."""
    two = Simulated(Settings(Accordion(NoCompression(), TopK(k=1), every=1), smallest=0), 2)
    g = {"w": torch.tensor([[100.0, 1.0], [1.0, 1.0]])}  # so that its norm does not depend on the method
    rates = [0.1, 0.2, 0.4, 0.3, 0.2, 0.2, 0.0, 0.2, 0.15, 0.1, 0.1, 0.1]
    dense = []
    for rate in rates:
        mean = two.average([g, g], {"w": 1 / rate if rate else 0.0})[0]["w"]
        dense.append(bool((mean != 0).sum() > 1))
    assert dense == [x == "1" for x in "110001000010"]


def test_decides_by_the_norm_of_the_sum() -> None:
    """Against a plain reference, with gradients that come and go. Tensors of one shape that go different ways."""
    every = 2
    two = Simulated(Settings(Accordion(PowerSGD(1), TopK(k=3), every=every), smallest=0), 2)
    sums, before, light, seen = torch.zeros(4, 4, 3), [None] * 4, [True] * 4, set()
    for step in range(20):
        gs = normal(4, 4, 3, workers=2, seed=step // 3)
        mean = torch.stack(list(two.average([dict(zip("abcd", g, strict=True)) for g in gs])[0].values()))
        assert [int(torch.linalg.matrix_rank(x)) == 1 for x in mean] == light
        sums += mean
        if step % every == every - 1:
            for i in range(4):
                norm, last = float(sums[i].norm()), before[i]
                light[i] = last is None or abs(norm - last) >= 0.5 * last
                before[i] = norm
            sums = torch.zeros(4, 4, 3)
        seen.add(tuple(light))
    assert len(seen) > 3


@pytest.mark.parametrize("methods", [(Int4(), EFSignSGD()), (TopK(0.1), NoCompression())], ids=str)
def test_nothing_is_lost_when_another_method_takes_over(methods: tuple[Method, Method]) -> None:
    """What a worker or an owner has not sent; at last an uncompressed average sends it."""
    two = Simulated(Settings(Accordion(*methods, every=1), smallest=0), 2)
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
    assert Accordion(NoCompression(), NoCompression(), every=1).kind == "exact"
    assert Accordion(Int4(), EFSignSGD(), every=1).exchanges == ("all_to_all", "all_gather")
    assert Accordion(Int4(), TopK(), every=1).exchanges == ("all_gather",)
