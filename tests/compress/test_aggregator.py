"""The aggregator, with simulated workers: which tensors go where, what is remembered, what is refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pufferfish.compress import (
    DGC,
    QSGD,
    Aggregator,
    BFloat16,
    BlockInt8,
    EFSignSGD,
    Gather,
    Meter,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    Scatter,
    SignSGD,
    Signum,
    Simulated,
    Sum,
    TopK,
)
from pufferfish.compress.bits import pack, unpack
from pufferfish.compress.table import KINDS
from pufferfish.compress.testing import check_compressor, gradients


def mean(given: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([g[name] for g in given]).mean(0)


def memory(aggregator: Aggregator, name: str, worker: int = 0) -> Tensor:
    kept: Tensor = aggregator.state_dict()["own"][worker][name]["memory"]
    return kept


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


def test_global_scope_chooses_among_all_elements() -> None:
    aggregator = Aggregator(TopK(50), Simulated(1), smallest=0, scope="global")
    g = gradients(1)[0]
    g["c.weight"] *= 100
    done = aggregator(g)
    assert (done["c.weight"] != 0).sum() == 50
    assert not any(done[name].any() for name in g if name != "c.weight")
    for name in g:
        assert torch.equal(memory(aggregator, name) + done[name], g[name])
    later = aggregator({name: 1e-3 * torch.ones_like(x) for name, x in g.items()})
    assert (later["c.weight"] != 0).sum() == 50  # what is left there is still the largest


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


def test_half_precision_gradients_have_a_memory_in_fp32() -> None:
    aggregator = Aggregator(TopK(1), Simulated(1), smallest=0)
    for _ in range(100):
        aggregator({"w": torch.tensor([1.0, 1e-3], dtype=torch.bfloat16)})
    assert memory(aggregator, "w").dtype == torch.float32
    torch.testing.assert_close(memory(aggregator, "w")[1], torch.tensor(0.1), rtol=5e-3, atol=0)


def test_autocast_does_not_reach_the_arithmetic() -> None:
    ends = []
    for enabled in (False, True):
        aggregator = Aggregator(PowerSGD(1), Simulated(2), smallest=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ends.append(aggregator.together(gradients(2))[0]["a.weight"])
    assert torch.equal(*ends)


def test_unused_parameters_keep_their_memory() -> None:
    """Zero on all workers: nothing is sent of it. Zero on one: that worker's memory may go."""
    aggregator = Aggregator(TopK(0.1), Simulated(2), smallest=0)
    aggregator.together(gradients(2))
    before = [memory(aggregator, "b.weight", w) for w in (0, 1)]
    given = gradients(2, 1)
    for g in given:
        g["b.weight"].zero_()
    done = aggregator.together(given)[0]
    assert not done["b.weight"].any()
    assert done["a.weight"].any()
    assert all(torch.equal(memory(aggregator, "b.weight", w), before[w]) for w in (0, 1))
    given[0]["b.weight"][0, 0] = 1.0
    assert aggregator.together(given)[0]["b.weight"].any()
    assert not torch.equal(memory(aggregator, "b.weight", 1), before[1])


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_units_scale_the_memory(scope: str) -> None:
    """A learning rate ten times smaller: what was left over counts as at the old one. A zero says nothing."""
    aggregator = Aggregator(TopK(0.1), Simulated(1), smallest=0, scope=scope)  # type: ignore[arg-type]
    names = list(gradients(1)[0])
    zeros = {name: torch.zeros_like(g) for name, g in gradients(1)[0].items()}
    aggregator(gradients(1)[0], dict.fromkeys(names, 10.0))
    before = {name: memory(aggregator, name) for name in names}
    aggregator(zeros, {name: 100.0 if name == "a.weight" else 10.0 for name in names})
    assert torch.equal(memory(aggregator, "a.weight"), before["a.weight"] * 10)
    assert torch.equal(memory(aggregator, "b.weight"), before["b.weight"])
    aggregator(zeros, dict.fromkeys(names, 0.0))
    aggregator(zeros, dict.fromkeys(names, 7.0))
    assert torch.equal(memory(aggregator, "b.weight"), before["b.weight"])


@dataclass(frozen=True)
class Plain(NoCompression):
    """Keeps nothing at all."""

    in_units = ()


def test_units_count_where_something_is_kept_in_them() -> None:
    """From before the first step on; also where another method, or a file, has left a memory."""
    left, plain, own = (Aggregator(m, Simulated(1), smallest=0) for m in (TopK(0.1), Plain(), TwoMemories()))
    assert [a.remembers for a in (left, plain, own)] == [True, False, True]
    assert Aggregator({"a": Plain(), "*": TopK()}).remembers
    left(gradients(1)[0])
    left.use(Plain())
    plain.load_state_dict(left.state_dict())
    warnings.simplefilter("ignore")  # of another method than the saved one
    for aggregator in (left, plain):
        assert aggregator.remembers
        aggregator({name: torch.zeros_like(g) for name, g in gradients(1)[0].items()})
        assert aggregator.remembers  # it waits: nothing was sent
        aggregator(gradients(1)[0])
        assert not aggregator.remembers


def test_parameters_may_come_in_any_order() -> None:
    """The state is theirs, not their places'."""
    ends = []
    for other in (False, True):
        aggregator = Aggregator(PowerSGD(1), Simulated(1), smallest=0)
        for step in range(3):
            g = gradients(1, step)[0]
            done = aggregator(dict(reversed(g.items())) if other and step == 1 else g)
        ends.append(done)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_another_method_goes_on_with_the_memory_or_sends_it() -> None:
    aggregator = Aggregator(PowerSGD(1), Simulated(2), smallest=0)
    total = {name: torch.zeros_like(g) for name, g in gradients(1)[0].items()}
    for step, method in enumerate([None, TopK(0.1), NoCompression(), None]):
        if method is not None:
            aggregator.use(method)
        given = gradients(2, step)
        done = aggregator.together(given)[0]
        for name, left in total.items():
            left += mean(given, name) - done[name]
        held = aggregator.state_dict()["own"]
        if step < 2:
            for name in ("a.weight", "c.weight"):
                torch.testing.assert_close(total[name], mean([{name: h[name]["memory"]} for h in held], name))
        else:
            assert held == [{}, {}]
            assert all(left.abs().max() < 1e-5 for left in total.values())
    assert aggregator.state_dict()["shared"] == {}  # PowerSGD's start is gone


def test_the_sent_memory_of_a_bad_step_waits() -> None:
    aggregator = Aggregator(TopK(0.1), Simulated(1), smallest=0)
    aggregator(gradients(1)[0])
    before = memory(aggregator, "a.weight")
    aggregator.use(BFloat16())
    bad = gradients(1)[0]
    bad["scale"].fill_(math.inf)
    aggregator(bad)
    assert torch.equal(memory(aggregator, "a.weight"), before)


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


def test_state_follows_parameters_by_name() -> None:
    """One is replaced, as by a switch: what is known of the others stays."""
    aggregator = Aggregator(PowerSGD(2), Simulated(1), smallest=0)
    g = gradients(1)[0]
    aggregator(g)
    before = aggregator.state_dict()
    del g["a.weight"]
    g["a.down.weight"], g["a.up.weight"] = torch.randn(6, 36), torch.randn(24, 6)
    g = {name: torch.zeros_like(x) if name == "b.weight" else x for name, x in g.items()}
    aggregator(g)
    after = aggregator.state_dict()
    assert after["own"][0].keys() == {"a.down.weight", "a.up.weight", "b.weight", "c.weight"}
    assert torch.equal(after["own"][0]["b.weight"]["memory"], before["own"][0]["b.weight"]["memory"])
    assert torch.equal(after["shared"]["b.weight"]["Q"], before["shared"]["b.weight"]["Q"])


def test_another_number_of_workers_drops_memories_and_keeps_what_is_shared() -> None:
    four, two = (Aggregator(PowerSGD(2), Simulated(n), smallest=0) for n in (4, 2))
    for step in range(2):
        four.together(gradients(4, step))
    saved = four.state_dict()
    with pytest.warns(UserWarning, match="rank 0, 1 of 2 starts with empty memories.* of 4"):
        two.load_state_dict(saved)
    now = two.state_dict()
    assert now["own"] == [{}, {}]
    assert torch.equal(now["shared"]["a.weight"]["Q"], saved["shared"]["a.weight"]["Q"])
    two.together(gradients(2, 2))
    again = Aggregator(PowerSGD(2), Simulated(2), smallest=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(now)
        again.load_state_dict(two.state_dict())
    assert two.steps == again.steps == 3
    with pytest.raises(ValueError, match="no compressor's state: it lacks inside, methods, own, scale"):
        two.load_state_dict({"steps": 1, "size": 2, "ranks": [0], "units": {}, "shared": {}})


def test_state_of_other_settings_is_not_used() -> None:
    first, second = (Aggregator(PowerSGD(r), Simulated(1), smallest=0) for r in (2, 3))
    first(gradients(1)[0])
    second.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match=r"was saved with PowerSGD\(rank=2\) and goes on with PowerSGD\(rank=3\)"
    ):
        assert second(gradients(1, 1)[0])["a.weight"].isfinite().all()
    assert second.state_dict()["shared"]["a.weight"]["Q"].shape == (36, 3)


@pytest.mark.parametrize("known", [False, True])
def test_state_of_another_model_is_refused(known: bool) -> None:
    """By names or by shapes: at once where the parameters are known, else in the first step."""
    saved = Aggregator(PowerSGD(2), Simulated(1), smallest=0)
    saved(gradients(1)[0])
    for here in (
        {"w": torch.randn(24, 36)},
        {name: torch.randn(*g.shape, 2) for name, g in gradients(1)[0].items()},
    ):
        aggregator = Aggregator(PowerSGD(2), Simulated(1), smallest=0)
        told = pytest.raises(ValueError, match=r"of another model, with .*a\.weight \(24, 36\).*; here are")
        if known:
            aggregator(here)
            with told:
                aggregator.load_state_dict(saved.state_dict())
            assert aggregator(here).keys() == here.keys()
        else:
            aggregator.load_state_dict(saved.state_dict())
            with told:
                aggregator(here)


def test_state_of_a_part_of_the_model_is_enough() -> None:
    """As after a switch; and where nothing is kept there is nothing to lose."""
    saved, nothing, aggregator = (
        Aggregator(method, Simulated(1), smallest=0) for method in (PowerSGD(2), NoCompression(), PowerSGD(2))
    )
    g = gradients(1)[0]
    saved(g)
    nothing({"w": torch.ones(3)})
    some = {"b.weight": g["b.weight"], "new": torch.randn(24, 36)}
    aggregator.load_state_dict(saved.state_dict())
    aggregator(some)
    aggregator.load_state_dict(nothing.state_dict())
    assert aggregator(some).keys() == some.keys()


@dataclass(frozen=True)
class TwoMemories(Method):
    """Scaled signs to the owners of shards and back, with a memory at both ends."""

    second: bool = True

    in_units = ("owner",)

    def compress(self, x, turn):  # type: ignore[no-untyped-def]
        d = x.shape[1]
        scale = x.abs().mean(1, keepdim=True)
        signs = turn.shards(x >= 0, 8)
        received = yield Scatter(tuple((pack(s, 1), scale) for s in signs))
        y = sum((2.0 * unpack(s, 1) - 1) * c for s, c in received) / turn.size
        inside = (torch.arange(y.shape[1]) + turn.rank * y.shape[1]) < d
        y = torch.where(inside, y, 0) + turn.state.get("owner", 0)
        c = y.abs().sum(1, keepdim=True) / max(1, int(inside.sum()))
        if self.second:
            turn.state["owner"] = torch.where(inside, y - torch.where(y >= 0, c, -c), 0)
        answers = yield Gather((pack(y >= 0, 1), c))
        whole = turn.whole([(2.0 * unpack(s, 1) - 1) * c for s, c in answers], d)
        return whole, x - torch.where(x >= 0, scale, -scale)


@pytest.mark.parametrize("method", [TopK(0.1), RandomK(0.1), RandomK(0.1, "own"), PowerSGD(1)], ids=repr)
def test_with_a_memory_workers_that_disagree_find_their_common_optimum(method: Method) -> None:
    """½‖x − c‖² with a c of each worker's own; only their mean counts. Without a memory Top-k cannot find it."""
    torch.manual_seed(1)
    c = [torch.randn(10, 10) * 10 ** torch.linspace(-1, 1, 10) for _ in range(4)]
    best = sum(c) / 4
    missed = {}
    for memory in (None, False):
        aggregator = Aggregator(method, Simulated(4), smallest=0, memory=memory)
        x = torch.zeros(10, 10)
        for step in range(800):
            x -= 0.05 * (1 - step / 800) * aggregator.together([{"x": x - c_} for c_ in c])[0]["x"]
        missed[memory] = float((x - best).norm() / best.norm())
    assert missed[None] < 0.03
    assert not isinstance(method, TopK) or missed[False] > 0.1


@dataclass(frozen=True)
class Marked(Method):
    """Keeps a truth value for each tensor."""

    def compress(self, x, turn):  # type: ignore[no-untyped-def]
        turn.state["mark"] = ~turn.state.get("mark", torch.zeros(len(x), 1, dtype=torch.bool))
        return (yield Sum(x)) / turn.size, 0 * x


def test_state_keeps_its_dtype() -> None:
    """Also where it has the gradient's shape, by chance."""
    first, second = (Aggregator(Marked(), Simulated(1), smallest=0) for _ in range(2))
    g = {"one": torch.ones(1), "two": torch.ones(2, dtype=torch.float64)}
    first(g)
    second.load_state_dict(first.state_dict())
    for marked in (True, False):
        marks = {n: state["mark"] for n, state in second.state_dict()["own"][0].items()}
        assert all(m.dtype == torch.bool and bool(m) == marked for m in marks.values())
        second(g)
    assert second.state_dict()["own"][0]["two"]["memory"].dtype == torch.float64


def test_saved_state_is_not_changed_afterwards() -> None:
    aggregator = Aggregator(TopK(0.1), Simulated(1), smallest=0)
    aggregator(gradients(1)[0], {"a.weight": 1.0})
    saved = aggregator.state_dict()
    copy = saved["own"][0]["a.weight"]["memory"].clone()
    aggregator.load_state_dict(saved)
    for step in range(3):
        aggregator(gradients(1, step)[0], {"a.weight": 2.0**step})
    assert torch.equal(saved["own"][0]["a.weight"]["memory"], copy)


def test_a_new_parameter_leaves_its_neighbours_memories_alone() -> None:
    """It comes into a batch of its shape, with nothing kept of its own."""
    aggregator = Aggregator(TwoMemories(), Simulated(2), smallest=0)
    g = [{"b": torch.randn(4, 8)} for _ in range(2)]
    aggregator.together(g)
    before = aggregator.state_dict()["own"][1]["b"]
    aggregator.together([{"a": torch.randn(4, 8), "b": torch.zeros(4, 8)} for _ in range(2)])
    after = aggregator.state_dict()["own"][1]
    assert all(torch.equal(after["b"][key], x) for key, x in before.items())
    assert after["a"].keys() == {"memory", "owner"}


def test_a_second_memory_at_the_owner_closes_the_balance() -> None:
    check_compressor(TwoMemories(), sizes=(1, 2, 4), draws=20)
    with pytest.raises(AssertionError, match="lost or gained"):
        check_compressor(TwoMemories(second=False), sizes=(4,), draws=20)


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


def released(first: Method, second: Method, size: int) -> float:
    """All gradients less all that was applied and what memories hold, beside the gradients."""
    a = Aggregator(first, Simulated(size), smallest=0)
    total = torch.zeros(24, 36)
    for step in range(6):
        if step == 3:
            a.use(second)
        given = gradients(size, step)
        total += mean(given, "a.weight") - a.together(given)[0]["a.weight"]
    kept = sum(
        memory(a, "a.weight", w) if "memory" in own["a.weight"] else 0
        for w, own in enumerate(a.state_dict()["own"])
    )
    return float((total - kept / size).norm() / 6 / 30)


@pytest.mark.parametrize("second", [TopK(0.1), TopK(0.5)], ids=repr)
@pytest.mark.parametrize("first", [DGC(0.9, momentum=0.0), EFSignSGD(), BlockInt8(8), TopK(0.1)], ids=repr)
def test_nothing_is_lost_between_methods(first: Method, second: Method) -> None:
    assert released(first, second, 3) < 1e-6


def test_without_a_memory_there_is_none() -> None:
    for method in (EFSignSGD(), BlockInt8(8), TopK(0.1)):
        a = Aggregator(method, Simulated(2), smallest=0, memory=False)
        a.together(gradients(2))
        assert a.state_dict()["own"] == [{}, {}], method


def test_an_owner_keeps_nothing_of_what_was_not_used() -> None:
    a = Aggregator(TopK(0.1), Simulated(1), smallest=0)
    a(gradients(1)[0])
    a.use(EFSignSGD())
    given = gradients(1, 1)[0]
    a(given | {"b.weight": torch.zeros(24, 36)})
    own = a.state_dict()["own"][0]
    assert own["a.weight"]["owner"].any()
    assert not own["b.weight"]["owner"].any()


def test_momenta_stay_when_a_tensor_joins_them() -> None:
    a = Aggregator(Signum(), Simulated(1), smallest=0)
    given = gradients(1)[0]
    a({"a.weight": given["a.weight"]})
    before = a.state_dict()["own"][0]["a.weight"]["m"]
    a({"a.weight": torch.zeros(24, 36), "b.weight": given["b.weight"]})
    after = a.state_dict()["own"][0]["a.weight"]["m"]
    assert torch.equal(after, before)  # as it was: the tensor was not used


@pytest.mark.parametrize("method", [PowerSGD(2), Signum(), DGC(), BlockInt8(8)], ids=repr)
def test_a_name_may_get_another_shape(method: Method) -> None:
    a = Aggregator(method, Simulated(1), smallest=0)
    for shape in ((24, 36), (36, 24), (12, 72)):
        assert a({"w": torch.randn(shape)})["w"].isfinite().all()


def test_a_momentum_follows_the_loss_scale_and_not_the_learning_rate() -> None:
    a = Aggregator(Signum(), Simulated(1), smallest=0)
    g = {"w": torch.ones(3, 3)}
    a(g, {"w": 8.0}, scale=4.0)
    before = a.state_dict()["own"][0]["w"]["m"]
    a({"w": torch.zeros(3, 3)}, {"w": 1.0}, scale=2.0)
    assert torch.equal(a.state_dict()["own"][0]["w"]["m"], before / 2)


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
