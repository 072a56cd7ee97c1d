"""What is left over of a gradient: where it is kept, in which units, and when it is sent."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from driver import mean
from pufferfish.compression import (
    DGC,
    Aggregator,
    BFloat16,
    BlockInt8,
    EFSignSGD,
    Gather,
    Method,
    NoCompression,
    PowerSGD,
    RandomK,
    Scatter,
    Signum,
    Simulated,
    TopK,
)
from pufferfish.compression.check_compressor import check_compressor, gradients
from pufferfish.compression.methods.bits import pack, unpack


def memory(aggregator: Aggregator, name: str, worker: int = 0) -> Tensor:
    kept: Tensor = aggregator.state_dict()["own"][worker][name]["memory"]
    return kept


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


def test_half_precision_gradients_have_a_memory_in_fp32() -> None:
    aggregator = Aggregator(TopK(1), Simulated(1), smallest=0)
    for _ in range(100):
        aggregator({"w": torch.tensor([1.0, 1e-3], dtype=torch.bfloat16)})
    assert memory(aggregator, "w").dtype == torch.float32
    torch.testing.assert_close(memory(aggregator, "w")[1], torch.tensor(0.1), rtol=5e-3, atol=0)


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


def test_a_momentum_follows_the_loss_scale_and_not_the_learning_rate() -> None:
    a = Aggregator(Signum(), Simulated(1), smallest=0)
    g = {"w": torch.ones(3, 3)}
    a(g, {"w": 8.0}, scale=4.0)
    before = a.state_dict()["own"][0]["w"]["m"]
    a({"w": torch.zeros(3, 3)}, {"w": 1.0}, scale=2.0)
    assert torch.equal(a.state_dict()["own"][0]["w"]["m"], before / 2)
