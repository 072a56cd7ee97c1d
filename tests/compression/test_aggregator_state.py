"""The aggregator's state: saved, loaded, and what of it fits another job."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch

from pufferfish.compression import (
    DGC,
    Aggregator,
    BlockInt8,
    Method,
    NoCompression,
    PowerSGD,
    Signum,
    Simulated,
    Sum,
    TopK,
)
from pufferfish.compression.check_compressor import gradients


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


@pytest.mark.parametrize("method", [PowerSGD(2), Signum(), DGC(), BlockInt8(8)], ids=repr)
def test_a_name_may_get_another_shape(method: Method) -> None:
    a = Aggregator(method, Simulated(1), smallest=0)
    for shape in ((24, 36), (36, 24), (12, 72)):
        assert a({"w": torch.randn(shape)})["w"].isfinite().all()
