"""A resumed run is bit-identical to an uninterrupted one; a checkpoint that does not fit changes nothing."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    SWITCH,
    TOTAL,
    Loader,
    Run,
    adamw,
    build,
    fused,
    mixed_precision,
    momentum,
    muon,
    two_optimizers,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import pufferfish as pf
from nested import equal
from optimizers import Net, muon_and_adamw, train
from pufferfish.checkpoint import Checkpoint


@pytest.mark.parametrize("make", [momentum, adamw, fused, two_optimizers, muon, mixed_precision])
def test_a_resumed_run_is_bit_identical(make: Callable[..., Any], tmp_path: Path) -> None:
    straight = Run(make, tmp_path / "uninterrupted", 0).go(0, TOTAL).everything()
    assert any(".down." in name for name in straight[0])
    for stop in (2, SWITCH, SWITCH + 2, "switch"):  # before, just before, after, and right behind the switch
        folder = tmp_path / str(stop)
        first = Run(make, folder, 0, every=1)
        first.go(0, TOTAL if stop == "switch" else int(stop), after_switch=stop == "switch")
        second = Run(make, folder, 99)
        at = second.checkpoint.resume()
        assert at is not None
        assert at.reset == []
        assert at.position == {"step": SWITCH if stop == "switch" else stop}
        equal(second.go(at.position["step"], TOTAL).everything(), straight, f"{stop}: ")


def test_factors_that_muon_does_not_take_resume(tmp_path: Path) -> None:
    """They are in another optimizer than their dense weight."""

    def run(stop: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizers, switch = muon_and_adamw(model), pf.Switch(rank=4, keep=["head"], when=pf.AtStep(2))
        with Checkpoint(tmp_path, model, optimizers, switch=switch) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, stop):
                switch.step(model, optimizers, step=step)
                train(model, optimizers, range(step, step + 1))
            if stop == 4:
                checkpoint.save(step=stop)
        assert any(
            p is model.gru.get_parameter("weight_hh_l0.up.weight")
            for p in optimizers[1].param_groups[1]["params"]
        )
        return [p.detach().clone() for p in model.parameters()]

    straight = run(6)
    run(4)
    equal(run(6), straight)


def test_a_run_with_muon_of_torch_resumes_with_ours(tmp_path: Path) -> None:
    """After the switch, from a dense model."""
    momenta = []
    for kind in (torch.optim.Muon, pf.lowrank.Muon):
        model = Net()
        optimizers, switch = muon_and_adamw(model, kind), pf.Switch(rank=4, keep=["head"], when=pf.AtStep(1))
        with Checkpoint(tmp_path, model, optimizers, switch=switch) as checkpoint:
            if kind is torch.optim.Muon:
                for step in range(2):
                    switch.step(model, optimizers, step=step)
                    train(model, optimizers, range(step, step + 1))
                checkpoint.save(step=2)
            else:
                at = checkpoint.resume()
                assert at is not None
                assert at.reset == []
        names = {p: name for name, p in model.named_parameters()}
        state = {names[p]: value for p, value in optimizers[0].state.items()}
        momenta.append({name: state[name]["momentum_buffer"] for name in sorted(state)})
    assert "fc.up.weight" in momenta[0]
    equal(momenta[1], momenta[0])


def test_a_model_that_is_low_rank_already_resumes(tmp_path: Path) -> None:
    straight = Run(momentum, tmp_path / "uninterrupted", 0).go(0, TOTAL).everything()
    run = Run(momentum, tmp_path / "a", 0, every=6).go(0, TOTAL)
    saved = copy.deepcopy(run.model)
    at = run.checkpoint.resume()  # the same objects, one step further on: back
    assert at is not None
    assert not torch.equal(saved[7].weight, run.model[7].weight)
    equal(run.go(6, TOTAL).everything(), straight)

    fresh = Run(momentum, tmp_path / "a", 99)
    plan = Checkpoint.plan_in(tmp_path / "a")
    assert plan is not None
    pf.reshape_(fresh.model, plan, fresh.optimizers)
    assert fresh.checkpoint.resume() is not None
    assert fresh.switch.report is not None
    assert fresh.switch.report.plan == plan
    equal(fresh.go(6, TOTAL).everything(), straight)


def test_a_factorized_model_needs_no_switch(tmp_path: Path) -> None:
    assert Checkpoint.plan_in(tmp_path) is None
    model = build()
    Checkpoint(tmp_path, model).save()
    assert Checkpoint.plan_in(tmp_path) is None
    pf.factorize_(model, pf.plan(model, 0.25))
    Checkpoint(tmp_path, model).save()
    other = build()
    with pytest.raises(ValueError, match=r"low-rank in 1 layers, this one is dense; .*plan_in"):
        Checkpoint(tmp_path, other).resume()
    plan = Checkpoint.plan_in(tmp_path)
    assert plan is not None
    pf.reshape_(other, plan)
    Checkpoint(tmp_path, other).resume()
    equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_compiled_model(tmp_path: Path) -> None:
    model = build()
    Checkpoint(tmp_path, torch.compile(model, backend="eager")).save()
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), nn.DataParallel):
        other = build()
        Checkpoint(tmp_path, wrap(other)).resume()
        equal(dict(other.cpu().state_dict()), dict(model.state_dict()))  # DataParallel moves it where it can


def test_averaged_models_are_saved(tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, Any, Any, pf.Switch]:
        model = build()
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        return model, torch.optim.Adam(model.parameters()), average, pf.Switch(rank=0.25, when=pf.AtStep(1))

    model, optimizer, average, switch = start()
    for step in range(2):
        switch.step(model, optimizer, step=step, also=[average])
        nn.functional.mse_loss(model(torch.randn(3, 2, 4, 4)), torch.ones(3, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        Checkpoint(tmp_path, model, optimizer, switch=switch, also=[average]).save(step=step + 1)
        again = start()
        Checkpoint(tmp_path, again[0], again[1], switch=again[3], also=[again[2]]).resume()
        equal(dict(again[2].state_dict()), dict(average.state_dict()))
        assert again[2].n_averaged == step + 1
    with pytest.raises(ValueError, match="saved with 1 averaged models, now 0; pass also="):
        Checkpoint(tmp_path, again[0], again[1], switch=again[3]).resume()


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.table.weight

        def get_extra_state(self) -> Any:
            return {"note": ("any", 1)}

        def set_extra_state(self, state: Any) -> None:
            self.note = state

    model, other = Tied(), Tied()
    folder = Checkpoint(tmp_path, model, torch.optim.Adam(model.parameters())).save()
    assert list(load_file(folder / "model.safetensors")) == ["table.weight"]
    Checkpoint(tmp_path, other, torch.optim.Adam(other.parameters())).resume()
    assert other.out.weight is other.table.weight
    assert torch.equal(other.out.weight, model.table.weight)
    assert other.note == {"note": ("any", 1)}


def test_optimizer_state_is_matched_by_name_and_keeps_its_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.randn(state["exp_avg"].shape)  # fp32, for bf16 parameters
    Checkpoint(tmp_path, model, optimizer).save()

    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    shuffled = torch.optim.Adam(list(other.parameters())[::-1], lr=7.0)
    Checkpoint(tmp_path, other, shuffled).resume()
    assert shuffled.param_groups[0]["lr"] == 1e-3
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        equal(shuffled.state[q], optimizer.state[p])
        assert shuffled.state[q]["exp_avg"].dtype == torch.float32


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Optimizer steps stay on their device and dropout draws the same numbers."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, capturable=True, lr=torch.tensor(1e-3, device="cuda")),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ]

    def start(seed: int, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 4)).cuda()
        return model, make(model.parameters())

    def go(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[Any]:
        for step in range(start, stop):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [dict(model.state_dict()), optimizer.state_dict(), torch.rand(3, device="cuda")]

    def devices(optimizer: torch.optim.Optimizer) -> list[Any]:
        state = [x for state in optimizer.state.values() for x in state.values()]
        return [x.device for x in [*state, optimizer.param_groups[0]["lr"]] if isinstance(x, Tensor)]

    for i, make in enumerate(makers):
        model, optimizer = start(0, make)
        go(model, optimizer, 0, 3)
        Checkpoint(tmp_path / str(i), model, optimizer).save()
        straight = go(model, optimizer, 3, 6)
        again, other = start(9, make)
        Checkpoint(tmp_path / str(i), again, other).resume()
        assert devices(other) == devices(optimizer)
        equal(go(again, other, 3, 6), straight, f"{i}: ")


@pytest.mark.gpu
def test_the_generator_of_the_models_gpu_is_restored(tmp_path: Path) -> None:
    """It need not be the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = nn.Linear(2, 2).to("cuda:1")
    Checkpoint(tmp_path, model).save()
    drawn = torch.rand(3, device="cuda:1")
    Checkpoint(tmp_path, model).resume()
    assert torch.equal(torch.rand(3, device="cuda:1"), drawn)


@pytest.mark.gpu
def test_control_messages_beside_nccl(tmp_path: Path) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with Checkpoint(tmp_path / "a", nn.Linear(2, 2).cuda(), every=1) as checkpoint:
            assert not checkpoint.step(step=1)
            assert checkpoint.resume() is not None
    finally:
        torch.distributed.destroy_process_group()


def test_parts_missing_on_either_side_are_reported(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    Checkpoint(tmp_path, model, optimizer, scheduler=scheduler).save(epoch=3, note="über", loss=math.inf)
    with pytest.warns(UserWarning, match="not restored: data"):
        at = Checkpoint(tmp_path, model, optimizer, data=Loader()).resume()
    assert at is not None
    assert at.position == {"epoch": 3, "note": "über", "loss": math.inf}
    assert at.reset == ["data (not saved)", "scheduler (not passed)"]


def other_model(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = build()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: other_model(lambda m: m.append(nn.Linear(4, 4))), None, "8.weight is in the model, but was not saved"),
        (lambda: other_model(lambda m: m.__setitem__(7, nn.Linear(64, 5))), None, "7.weight was saved as 4×64 float32, but is 5×64 float32 in"),
        (lambda: build().double(), None, "0.weight was saved as 16×2×3×3 float32, but is 16×2×3×3 float64 in"),
        (lambda: build().to("meta"), None, "0.weight is on the meta device"),
        (build, lambda m: torch.optim.Adam(m.parameters()), "the saved optimizer is SGD, this one is Adam"),
        (build, lambda m: torch.optim.SGD(m[0].parameters()), r"SGD, group 0: 1.bias is only in the saved optimizer"),
        (build, lambda m: [torch.optim.SGD(m.parameters())] * 2, "saved with 1 optimizers, now 2"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    model: Any, optimizer: Any, message: str, tmp_path: Path
) -> None:
    saved = build()
    Checkpoint(tmp_path, saved, torch.optim.SGD(saved.parameters())).save()
    model = model()
    optimizer = optimizer(model) if optimizer else torch.optim.SGD(model.parameters())
    before = copy.deepcopy(dict(model.state_dict()))
    drawn = torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.", ".")):
        Checkpoint(tmp_path, model, optimizer).resume()
    assert torch.equal(torch.get_rng_state(), drawn)
    if not next(model.parameters()).is_meta:
        equal(dict(model.state_dict()), before)


def local_steps(model: nn.Module, fragments: int) -> pf.LocalSteps:
    local = pf.LocalSteps(4, fragments=fragments)
    local.start(model)
    return local


def warm_up(optimizer: torch.optim.Optimizer, after: Any) -> Any:
    return schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer), after], [2])


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            lambda m, o: {"scheduler": schedulers.ExponentialLR(o, 0.9)},
            lambda m, o: {"scheduler": schedulers.LambdaLR(o, lambda step: 1.0)},
            "scheduler was saved as ExponentialLR, but is LambdaLR; pass the same class",
        ),
        (
            lambda m, o: {"scheduler": warm_up(o, schedulers.CosineAnnealingLR(o, 10))},
            lambda m, o: {"scheduler": warm_up(o, schedulers.ExponentialLR(o, 0.9))},
            r"saved as SequentialLR\(LinearLR, CosineAnnealingLR\), but is SequentialLR\(LinearLR, ExponentialLR\)",
        ),
        (
            lambda m, o: {"compressor": local_steps(m, 2)},
            lambda m, o: {"compressor": local_steps(m, 1)},
            "compressor: LocalSteps: saved with fragments=2, now fragments=1",
        ),
    ],
)
def test_a_part_that_does_not_fit_changes_nothing(saved: Any, now: Any, message: str, tmp_path: Path) -> None:
    def passed(parts: Any, lr: float) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return model, optimizer, parts(model, optimizer)

    model, optimizer, parts = passed(saved, 0.1)
    Checkpoint(tmp_path, model, optimizer, **parts).save()
    model, optimizer, parts = passed(now, 0.2)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(ValueError, match=f"{tmp_path.name}/.*{message}"):
        Checkpoint(tmp_path, model, optimizer, **parts).resume()
    equal([model.state_dict(), optimizer.state_dict()], before)


def test_an_error_of_load_state_dict_names_the_part(tmp_path: Path) -> None:
    model, data = build(), Loader()
    Checkpoint(tmp_path, model, data=data).save()
    data.load_state_dict = lambda state: state["position"]  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=f"{tmp_path.name}/.*: data: KeyError: 'position'; pass the data that was"
    ):
        Checkpoint(tmp_path, model, data=data).resume()


def test_a_switched_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    Run(adamw, tmp_path, 0, every=3).go(0, TOTAL)
    model = other_model(lambda m: m.__setitem__(7, nn.Linear(64, 5)))
    optimizer = torch.optim.AdamW(model.parameters())
    switch = pf.Switch(rank=0.25, when=pf.AtStep(SWITCH))
    for message in ("000002-step-6: 7: the plan is for a weight of 4×64", "the saved AdamW has 2 groups"):
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path, model, optimizer, switch=switch).resume()
        assert not any(isinstance(m, pf.layers.LowRank) for m in model.modules())
        assert switch.report is None
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
