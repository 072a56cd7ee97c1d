"""The aggregator, with simulated workers: which tensors go where and how, what is counted, what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from driver import mean
from pufferfish.compression import (
    QSGD,
    Aggregator,
    BFloat16,
    Gather,
    Meter,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    SignSGD,
    Simulated,
    Sum,
    TopK,
)
from pufferfish.compression.check_compressor import gradients
from pufferfish.compression.settings import KINDS


def test_small_and_flat_tensors_travel_as_they_are() -> None:
    aggregator = Aggregator(TopK(1), Simulated(2), smallest=1000)
    given = gradients(2)
    done = aggregator.together(given)[0]
    for name in ("a.weight", "b.weight", "a.bias", "scale"):
        torch.testing.assert_close(done[name], mean(given, name))
    assert (done["c.weight"] != 0).sum() <= 2
    assert aggregator.state_dict()["own"][0].keys() == {"c.weight"}


def test_one_message_of_a_kind_in_a_round() -> None:
    """Four methods: the first round's sums, the gathered values, PowerSGD's second sum, and bf16 apart."""
    methods = {
        "a": PowerSGD(1),
        "b": TopK(0.1),
        "c": RandomK(0.1, "own"),
        "scale": BFloat16(),
        "*": PowerSGD(1),
    }
    aggregator = Aggregator(methods, Simulated(2), smallest=0)
    aggregator.together(gradients(2))
    assert aggregator.meter.messages == 4
    # a: P and Q; a.bias: as it is; how each of the five does, and whether all is well; scale in 2 bytes
    assert aggregator.meter.handed["all_reduce"] == 4 * (24 + 36) + 4 * 24 + 4 * 6 + 2
    assert aggregator.meter.handed["all_gather"] == 8 * (87 + 120)


def test_patterns_name_parameters_or_modules_and_the_first_counts() -> None:
    aggregator = Aggregator({"a": TopK(1), "*.weight": BFloat16()}, Simulated(1), smallest=0)
    g = gradients(1)[0]
    done = aggregator(g)
    assert (done["a.weight"] != 0).sum() == (done["a.bias"] != 0).sum() == 1
    assert torch.equal(done["b.weight"], g["b.weight"].bfloat16().float())
    assert torch.equal(done["scale"], g["scale"])
    with pytest.raises(ValueError, match=r"'d\.\*' matches no parameter; there are a.weight"):
        Aggregator({"d.*": TopK(), "*": BFloat16()}, Simulated(1))(g)


def test_plain_averaging_in_any_dtype_and_memory_format() -> None:
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        given = [
            {"w": torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last)} for _ in range(3)
        ]
        done = Aggregator(NoCompression(), Simulated(3)).together(given)[2]["w"]
        assert done.dtype == dtype
        torch.testing.assert_close(done, mean(given, "w"), rtol=close, atol=close)
    aggregator = Aggregator(NoCompression(), Simulated(3))
    aggregator.together(given)
    assert aggregator.meter.handed["all_reduce"] == 2 * 300 + 8  # bf16 stays bf16


def test_autocast_does_not_reach_the_arithmetic() -> None:
    ends = []
    for enabled in (False, True):
        aggregator = Aggregator(PowerSGD(1), Simulated(2), smallest=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ends.append(aggregator.together(gradients(2))[0]["a.weight"])
    assert torch.equal(*ends)


@dataclass(frozen=True)
class Delicate(Method):
    """Like an SVD, it cannot take what is not finite."""

    def compress(self, x, turn):  # type: ignore[no-untyped-def]
        assert x.isfinite().all()
        total = yield Sum(x)
        assert total.isfinite().all()
        return total / turn.size, 0 * x


def test_methods_see_finite_numbers_only() -> None:
    for value in (math.nan, math.inf, 1e20):
        given = gradients(2)
        given[1]["a.weight"][0, 0] = value
        assert Aggregator(Delicate(), Simulated(2), smallest=0).together(given)[0]["b.weight"].isnan().all()


def test_nonfinite_may_be_zero() -> None:
    aggregator = Aggregator(TopK(0.1), Simulated(2), nonfinite="zero")
    given = gradients(2)
    given[1]["a.bias"][3] = math.nan
    assert not any(x.any() for x in aggregator.together(given)[0].values())


def test_bytes_on_the_wire() -> None:
    """Of b bytes handed over by each of 4 workers: ring all-reduce 2b·3/4, all-gather 3b, all-to-all b·3/4."""
    for kind, sent in (("all_reduce", 150), ("all_gather", 300), ("all_to_all", 75)):
        meter = Meter()
        meter.count(kind, 100, 4)
        assert (meter.wire_bytes, meter.messages, meter.handed[kind]) == (sent, 1, 100)


def test_times_and_bytes_add_up() -> None:
    aggregator = Aggregator(PowerSGD(2), Simulated(4), smallest=0)
    for step in range(3):
        aggregator.together(gradients(4, step))
    told = aggregator.meter.as_dict()
    assert told["steps"] == 3
    assert told["gradient_bytes"] == 3 * 4 * (2 * 24 * 36 + 16 * 75 + 24 + 1)
    assert told["wire_bytes"] == told["all_reduce_bytes"] * 2 * 3 / 4
    assert min(told[f"{what}_seconds"] for what in ("encode", "exchange", "decode")) > 0
    aggregator.meter.reset()
    assert not any(aggregator.meter.as_dict().values())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Aggregator(QSGD(), memory=True), "QSGD goes without a memory: its errors average out"),
        (lambda: Aggregator(SignSGD(), memory=True), "SignSGD goes without a memory: a vote"),
        (lambda: Aggregator(BFloat16(), memory=True), "BFloat16 goes without a memory: what it loses"),
        (lambda: Aggregator({"*": RandomK(scale=True)}, memory=True), "RandomK goes without a memory"),
        (
            lambda: Aggregator(PowerSGD(), scope="global"),
            'PowerSGD treats every tensor on its own; scope="global"',
        ),
        (lambda: Aggregator(TopK(), scope="all"), "scope='all' is neither"),  # type: ignore[arg-type]
        (lambda: Aggregator(TopK(), nonfinite="skip"), "nonfinite='skip' is neither"),  # type: ignore[arg-type]
        (lambda: Aggregator({}), "needs at least one pattern"),
        (lambda: Simulated(0), "0 workers"),
        (
            lambda: Aggregator(TopK(), Simulated(2))({"w": torch.ones(2)}),
            "1 workers' gradients were given, but 2",
        ),
        (lambda: Aggregator(TopK())({"w": torch.ones(2, dtype=torch.int)}), "w: a torch.int32 gradient"),
    ],
)
def test_nonsense_is_refused(make, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=told):
        make()


def test_a_class_is_no_method() -> None:
    with pytest.raises(TypeError, match=r"TopK is not a compression method; write TopK\(\)"):
        Aggregator(TopK)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"str, for 'a', is not a compression method; write pf\.PowerSGD"):
        Aggregator({"a": "TopK"})  # type: ignore[dict-item]


def test_the_table_knows_every_kind() -> None:
    for method in (NoCompression(), BFloat16(), PowerSGD(), TopK(), RandomK(scale=True), SignSGD(), QSGD()):
        assert method.kind in KINDS


def test_patterns_that_others_hide_are_refused() -> None:
    hidden = Aggregator({"*": BFloat16(), "a": TopK()}, Simulated(1))
    with pytest.raises(ValueError, match="'a' comes after others that match all it does"):
        hidden(gradients(1)[0])


def test_what_is_no_method_says_so() -> None:
    @dataclass(frozen=True)
    class Silent(Method):
        def compress(self, x, turn):  # type: ignore[no-untyped-def]
            return x, None

    with pytest.raises(TypeError, match="must yield what it sends"):
        Aggregator(Silent(), smallest=0)({"w": torch.ones(2)})
    with pytest.raises(TypeError, match=r"Gather\(\(x,\)\)"):
        Gather(torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"seed": "a"}, {"smallest": -1}, {"overlap": "yes"}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Aggregator(TopK(), **settings)
