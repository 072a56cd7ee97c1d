"""The engine, with simulated workers: which tensors are compressed how, what is counted, which settings are refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import torch

from driver import mean
from pufferfish.compression import (
    QSGD,
    BFloat16,
    Engine,
    Gather,
    Meter,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    Settings,
    SignSGD,
    Simulated,
    Sum,
    TopK,
)
from pufferfish.compression.check_compressor import gradients


def test_small_and_1d_tensors_are_sent_uncompressed() -> None:
    simulated = Simulated(Settings(TopK(1), smallest=1000), 2)
    given = gradients(2)
    done = simulated.average(given)[0]
    for name in ("a.weight", "b.weight", "a.bias", "scale"):
        torch.testing.assert_close(done[name], mean(given, name))
    assert (done["c.weight"] != 0).sum() <= 2
    assert simulated.engines[0].state_dict()["own"].keys() == {"c.weight"}


def test_one_message_of_each_kind_in_a_round() -> None:
    """Four methods: the first round's sums, the gathered values, PowerSGD's second sum, and bf16 apart."""
    methods = {
        "a": PowerSGD(1),
        "b": TopK(0.1),
        "c": RandomK(0.1, "own"),
        "scale": BFloat16(),
        "*": PowerSGD(1),
    }
    engine = Simulated(Settings(methods, smallest=0), 2)
    engine.average(gradients(2))
    assert engine.meter.messages == 4
    # a: P and Q; a.bias uncompressed; flags: which of the five are used, and whether all are finite; scale in 2 bytes
    assert engine.meter.collective_bytes["all_reduce"] == 4 * (24 + 36) + 4 * 24 + 4 * 6 + 2
    assert engine.meter.collective_bytes["all_gather"] == 8 * (87 + 120)


def test_patterns_match_parameters_or_modules_and_the_first_match_counts() -> None:
    engine = Engine(Settings({"a": TopK(1), "*.weight": BFloat16()}, smallest=0))
    g = gradients(1)[0]
    done = engine.average(g)
    assert (done["a.weight"] != 0).sum() == (done["a.bias"] != 0).sum() == 1
    assert torch.equal(done["b.weight"], g["b.weight"].bfloat16().float())
    assert torch.equal(done["scale"], g["scale"])
    with pytest.raises(ValueError, match=r"'d\.\*' matches no parameter; the parameters are a.weight"):
        Engine(Settings({"d.*": TopK(), "*": BFloat16()})).average(g)


def test_plain_averaging_in_any_dtype_and_memory_format() -> None:
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        given = [
            {"w": torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last)} for _ in range(3)
        ]
        done = Simulated(Settings(NoCompression()), 3).average(given)[2]["w"]
        assert done.dtype == dtype
        torch.testing.assert_close(done, mean(given, "w"), rtol=close, atol=close)
    engine = Simulated(Settings(NoCompression()), 3)
    engine.average(given)
    assert engine.meter.collective_bytes["all_reduce"] == 2 * 300 + 8  # bf16 stays bf16


def test_autocast_does_not_change_the_arithmetic() -> None:
    ends = []
    for enabled in (False, True):
        engine = Simulated(Settings(PowerSGD(1), smallest=0), 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ends.append(engine.average(gradients(2))[0]["a.weight"])
    assert torch.equal(*ends)


@dataclass(frozen=True)
class Delicate(Method):
    """Like an SVD, it takes finite numbers only."""

    def compress(self, x, ctx):  # type: ignore[no-untyped-def]
        assert x.isfinite().all()
        total = yield Sum(x)
        assert total.isfinite().all()
        return total / ctx.size, 0 * x


def test_methods_see_finite_numbers_only() -> None:
    for value in (math.nan, math.inf, 1e20):
        given = gradients(2)
        given[1]["a.weight"][0, 0] = value
        assert Simulated(Settings(Delicate(), smallest=0), 2).average(given)[0]["b.weight"].isnan().all()


def test_nonfinite_may_be_zero() -> None:
    engine = Simulated(Settings(TopK(0.1), nonfinite="zero"), 2)
    given = gradients(2)
    given[1]["a.bias"][3] = math.nan
    assert not any(x.any() for x in engine.average(given)[0].values())


def test_bytes_on_the_wire() -> None:
    """For b bytes from each of 4 workers: ring all-reduce 2b·3/4, all-gather 3b, all-to-all b·3/4."""
    for kind, sent in (("all_reduce", 150), ("all_gather", 300), ("all_to_all", 75)):
        meter = Meter()
        meter.sent(kind, 100, 4)
        assert (meter.wire_bytes, meter.messages, meter.collective_bytes[kind]) == (sent, 1, 100)


def test_times_and_bytes_add_up() -> None:
    engine = Simulated(Settings(PowerSGD(2), smallest=0), 4)
    for step in range(3):
        engine.average(gradients(4, step))
    counts = engine.meter.as_dict()
    assert counts["steps"] == 3
    assert counts["gradient_bytes"] == 3 * 4 * (2 * 24 * 36 + 16 * 75 + 24 + 1)
    assert counts["wire_bytes"] == counts["all_reduce_bytes"] * 2 * 3 / 4
    assert min(counts[f"{what}_seconds"] for what in ("encode", "exchange", "decode")) > 0
    engine.meter.reset()
    assert not any(engine.meter.as_dict().values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Settings(QSGD(), error_feedback=True),
            "QSGD works without error feedback: its errors average out",
        ),
        (lambda: Settings(SignSGD(), error_feedback=True), "SignSGD works without error feedback: a vote"),
        (
            lambda: Settings(BFloat16(), error_feedback=True),
            "BFloat16 works without error feedback: the error",
        ),
        (
            lambda: Settings({"*": RandomK(scale=True)}, error_feedback=True),
            "RandomK works without error feedback",
        ),
        (
            lambda: Settings(PowerSGD(), scope="global"),
            'PowerSGD compresses every tensor separately; scope="global"',
        ),
        (lambda: Settings(TopK(), scope="all"), "scope='all' is neither"),  # type: ignore[arg-type]
        (
            lambda: Settings(TopK(), scope="global", overlap=True),
            "overlap=True: scope=.global. and hierarchy",
        ),
        (lambda: Settings(TopK(), nonfinite="skip"), "nonfinite='skip' is neither"),  # type: ignore[arg-type]
        (
            lambda: Engine(Settings(TopK())).average({"w": torch.ones(2, dtype=torch.int)}),
            "w: its gradient is torch.int32",
        ),
    ],
)
def test_invalid_settings_and_gradients_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_class_is_not_a_method() -> None:
    with pytest.raises(TypeError, match=r"TopK is not a compression method; write TopK\(\)"):
        Settings(TopK)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str, for 'a', is not a compression method"):
        Settings({"a": "TopK"})  # type: ignore[dict-item]


def test_patterns_hidden_by_earlier_ones_are_refused() -> None:
    hidden = Engine(Settings({"*": BFloat16(), "a": TopK()}))
    with pytest.raises(ValueError, match="'a' comes after patterns that match the same parameters"):
        hidden.average(gradients(1)[0])


def test_a_message_of_one_tensor_is_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"Gather\(\(x,\)\)"):
        Gather(torch.ones(2))  # type: ignore[arg-type]


def _no_yield(self: Method, x: torch.Tensor, ctx: object) -> object:
    return x, None


def _yields_a_tensor(self: Method, x: torch.Tensor, ctx: object) -> object:
    return (yield x), None


def _forgets_the_rest(self: Method, x: torch.Tensor, ctx: object) -> object:
    return (yield Sum(x))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": "matrix"}, "Own: layout='matrix' is none of vectors, elements, matrices, row"),
        ({"kind": "lossless"}, "Own: kind='lossless' is none of contraction, exact, "),
        ({"compress": _no_yield}, "Own.compress is not a generator"),
        ({"compress": _yields_a_tensor}, "_yields_a_tensor yields a Tensor; yield Sum"),
        ({"compress": _forgets_the_rest}, "_forgets_the_rest must return two values, the mean and the rest"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_methods_that_break_the_contract_are_named(wrong: dict[str, object], message: str) -> None:
    own = dataclass(frozen=True)(type("Own", (Method,), wrong))
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        Engine(Settings(own())).average({"w": torch.ones(64, 64)})
