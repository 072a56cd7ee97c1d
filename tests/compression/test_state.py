"""State: saved, loaded, moved to other batches, and dropped where it does not fit."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from pufferfish.compression import (
    DGC,
    Accordion,
    BlockInt8,
    Engine,
    Method,
    NoCompression,
    PowerSGD,
    Settings,
    Signum,
    Simulated,
    TopK,
)
from pufferfish.compression.check_compressor import gradients


def test_state_follows_parameters_by_name() -> None:
    """One is replaced, as by a switch: the state of the others stays."""
    engine = Engine(Settings(PowerSGD(2), smallest=0))
    g = gradients(1)[0]
    engine.average(g)
    before = engine.state_dict()
    del g["a.weight"]
    g["a.down.weight"], g["a.up.weight"] = torch.randn(6, 36), torch.randn(24, 6)
    g = {name: torch.zeros_like(x) if name == "b.weight" else x for name, x in g.items()}
    engine.average(g)
    after = engine.state_dict()
    assert after["own"].keys() == {"a.down.weight", "a.up.weight", "b.weight", "c.weight"}
    assert torch.equal(after["own"]["b.weight"]["error"], before["own"]["b.weight"]["error"])
    assert torch.equal(after["shared"]["b.weight"]["Q"], before["shared"]["b.weight"]["Q"])


def test_another_number_of_workers_keeps_shared_state_only() -> None:
    four, two = (Simulated(Settings(PowerSGD(2), smallest=0), n) for n in (4, 2))
    for step in range(2):
        four.average(gradients(4, step))
    saved = four.state_dict()
    with pytest.warns(UserWarning, match="worker 1 of 2 starts with empty error feedback.* worker 1 of 4"):
        two.load_state_dict(saved)
    now = two.state_dict()
    for before, after in zip(saved["workers"], now["workers"], strict=False):
        assert after["own"] == {}
        assert torch.equal(after["shared"]["a.weight"]["Q"], before["shared"]["a.weight"]["Q"])
    two.average(gradients(2, 2))
    again = Simulated(Settings(PowerSGD(2), smallest=0), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(now)
        again.load_state_dict(two.state_dict())
    assert two.engines[0].steps == again.engines[0].steps == 3
    with pytest.raises(
        ValueError, match="not a state of compression: it lacks format, inside, methods, own, scale"
    ):
        two.engines[0].load_state_dict({"steps": 1, "size": 2, "worker": 0, "units": {}, "shared": {}})


@pytest.mark.parametrize("known", [False, True])
def test_state_of_another_model_is_refused(known: bool) -> None:
    """By names or by shapes; at once where the parameters are known, otherwise in the first step."""
    saved = Engine(Settings(PowerSGD(2), smallest=0))
    saved.average(gradients(1)[0])
    for here in (
        {"w": torch.randn(24, 36)},
        {name: torch.randn(*g.shape, 2) for name, g in gradients(1)[0].items()},
    ):
        engine = Engine(Settings(PowerSGD(2), smallest=0))
        refused = pytest.raises(
            ValueError, match=r"belongs to another model, with .*a\.weight \(24, 36\).*; this model has"
        )
        if known:
            engine.average(here)
            with refused:
                engine.load_state_dict(saved.state_dict())
            assert engine.average(here).keys() == here.keys()
        else:
            engine.load_state_dict(saved.state_dict())
            with refused:
                engine.average(here)


def test_state_of_a_part_of_the_model_is_enough() -> None:
    """As after a switch. A state without tensors fits any model."""
    saved, nothing, engine = (
        Engine(Settings(method, smallest=0)) for method in (PowerSGD(2), NoCompression(), PowerSGD(2))
    )
    g = gradients(1)[0]
    saved.average(g)
    nothing.average({"w": torch.ones(3)})
    some = {"b.weight": g["b.weight"], "new": torch.randn(24, 36)}
    engine.load_state_dict(saved.state_dict())
    engine.average(some)
    engine.load_state_dict(nothing.state_dict())
    assert engine.average(some).keys() == some.keys()


def test_saved_state_is_not_changed_afterwards() -> None:
    engine = Engine(Settings(TopK(0.1), smallest=0))
    engine.average(gradients(1)[0], {"a.weight": 1.0})
    saved = engine.state_dict()
    copy = saved["own"]["a.weight"]["error"].clone()
    engine.load_state_dict(saved)
    for step in range(3):
        engine.average(gradients(1, step)[0], {"a.weight": 2.0**step})
    assert torch.equal(saved["own"]["a.weight"]["error"], copy)


@pytest.mark.parametrize("method", [PowerSGD(2), Signum(), DGC(), BlockInt8(8)], ids=repr)
def test_a_name_may_get_another_shape(method: Method) -> None:
    engine = Engine(Settings(method, smallest=0))
    for shape in ((24, 36), (36, 24), (12, 72)):
        assert engine.average({"w": torch.randn(shape)})["w"].isfinite().all()


def saved_by(method: Method) -> dict[str, Any]:
    """State of one worker after two steps."""
    engine = Engine(Settings(method, smallest=0))
    for step in range(2):
        engine.average(gradients(1, step)[0])
    return engine.state_dict()


ZEROS = {name: torch.zeros_like(g) for name, g in gradients(1)[0].items()}  # a step in which nothing is used


@pytest.mark.parametrize(
    ("saved", "here"), [(DGC(0.9), DGC(0.9, momentum=0.5)), (Signum(), Signum(0.8))], ids=repr
)
def test_state_with_another_value_of_a_field_is_dropped(saved: Method, here: Method) -> None:
    engine = Engine(Settings(here, smallest=0))
    engine.load_state_dict(saved_by(saved))
    with pytest.warns(UserWarning, match=rf"was saved with {type(saved).__name__}\(.*and resumes with"):
        engine.average(ZEROS)
    assert not any(x.any() for x in engine.state.named()["a.weight"].values())


def test_error_feedback_is_kept_with_another_value_of_a_field() -> None:
    state = saved_by(TopK(0.1))
    engine = Engine(Settings(TopK(0.2), smallest=0))
    engine.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"with TopK\(k=0.1, sample=1.0\) and resumes with TopK\(k=0.2"):
        engine.average(ZEROS)
    for name, saved in state["own"].items():
        assert torch.equal(engine.state.named()[name]["error"], saved["error"])


def test_state_of_another_format_is_refused() -> None:
    engine = Engine(Settings(TopK()))
    with pytest.raises(ValueError, match="compression state of format 99; this version reads format 1"):
        engine.load_state_dict(saved_by(TopK(0.1)) | {"format": 99})
    assert engine.steps == 0


def test_saved_methods_are_json_data() -> None:
    """Class, fields and shape; of Accordion, those of the method that a tensor has now."""
    engine = Engine(Settings(Accordion(PowerSGD(2), TopK(0.1), every=3), smallest=0))
    engine.average({"w": torch.ones(24, 36)})
    methods = engine.state_dict()["methods"]
    assert json.loads(json.dumps(methods)) == methods
    assert methods == {
        "w": {"class": "PowerSGD", "fields": {"rank": 2, "start": 0, "bf16": False}, "shape": [24, 36]}
    }


def test_a_worker_leaves_and_the_others_keep_what_they_have_not_sent() -> None:
    """Error feedback stays, and the errors that an owner kept for all become its own: none of them is lost."""
    size, left = 3, 2
    three = Simulated(Settings(BlockInt8(), smallest=0), size)
    for step in range(2):
        three.average(gradients(size, step))
    states = [engine.state_dict()["own"] for engine in three.engines[:left]]
    for worker, engine in enumerate(three.engines[:left]):
        engine.state.move(worker, left)
    kept = 0
    for name, g in gradients(1)[0].items():
        if "owner" not in states[0].get(name, {}):
            continue
        # What is still missing in the mean of the two: their errors, and those of the shards that they owned.
        owned = torch.zeros(size, states[0][name]["owner"].numel())
        for worker, state in enumerate(states):
            owned[worker] = state[name]["owner"].flatten()
        missing = sum(state[name]["error"] for state in states) / left
        missing = missing + owned.flatten()[: g.numel()].view_as(g)
        after = [engine.state_dict()["own"][name] for engine in three.engines[:left]]
        torch.testing.assert_close(sum(state["error"] for state in after) / left, missing)
        assert all("owner" not in state for state in after)
        kept += int(owned.count_nonzero())
    assert kept > 0


@pytest.mark.parametrize("method", [PowerSGD(2), TopK(0.1), DGC(), Signum()], ids=lambda m: type(m).__name__)
def test_state_that_does_not_depend_on_the_number_of_workers_stays(method: Method) -> None:
    three = Simulated(Settings(method, smallest=0), 3)
    three.average(gradients(3))
    before = three.engines[1].state_dict()
    three.engines[1].state.move(0, 2)
    after = three.engines[1].state_dict()
    assert (after["worker"], after["size"]) == (0, 2)
    for part in ("own", "shared"):
        for name, tensors in before[part].items():
            assert all(torch.equal(x, after[part][name][key]) for key, x in tensors.items())
