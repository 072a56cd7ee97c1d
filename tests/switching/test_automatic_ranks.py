"""`pf.Switch()` without ranks: on flat, steep and mixed spectra, and where it is not worth it."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from matrices import linear_with
from processes import in_processes
from pufferfish.lowrank.rewrite import whole
from pufferfish.switching.fsdp2 import parameters

STEEP = torch.logspace(0, -3, 64, dtype=torch.float64)
FLAT = torch.ones(64, dtype=torch.float64)


def at_once(**options: Any) -> pf.Switch:
    return pf.Switch(when=pf.AtStep(1), **options)


def switched(model: nn.Module, *spectra: Tensor, **options: Any) -> pf.Switch:
    """Switch a model after its layers got these spectra."""
    switch = at_once(**options)
    assert not switch.step(model, None, step=0)
    for i, sigma in enumerate(spectra):
        model[i] = linear_with(sigma, 64, 128)  # type: ignore[operator]
    switch.step(model, None, step=1)
    return switch


def random_layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 64, bias=False) for _ in range(count)))


@pytest.mark.parametrize(
    ("spectra", "lowered"), [([FLAT] * 4, True), ([STEEP] * 4, False), ([FLAT, STEEP, STEEP, STEEP], False)]
)
def test_ranks_of_flat_spectra_are_lowered_and_of_steep_ones_are_not(
    spectra: list[Tensor], lowered: bool
) -> None:
    model = random_layers(4)
    start = pf.planning.spectra(model)
    switch = switched(model, *spectra)
    assert switch.report is not None
    ranks = [e.rank for e in switch.report.plan]
    plain = [
        e.rank
        for e in pf.resolve(pf.plan(random_trained(spectra), pf.StableRank(start)), random_trained(spectra))
    ]
    assert ranks == ([32] * 4 if lowered else plain)  # 60 % of 64 × 128 is rank 25.6, rounded up
    line = "ranks lowered: stable ranks would keep 75% of the weights of these layers"
    assert (line in str(switch.report)) == lowered


def random_trained(spectra: list[Tensor]) -> nn.Module:
    return nn.Sequential(*(linear_with(sigma, 64, 128) for sigma in spectra))


def mostly_embedding() -> nn.Module:
    """Half of the linear layers is a sixteenth of the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(2000, 64), *(nn.Linear(64, 64) for _ in range(4)))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(torch.arange(8) + step).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(
    model: nn.Module, switch: pf.Switch | None, steps: range, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            if switch is not None:
                assert not switch.step(model, optimizer, step=step)
            update(model, optimizer, step)
    return [str(w.message) for w in caught if "stays dense" in str(w.message)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def test_a_model_stays_dense_where_little_would_be_saved(tmp_path: Path) -> None:
    """Training goes on as if there were no switch, also from a checkpoint."""
    plain, model = mostly_embedding(), mostly_embedding()
    run(plain, None, range(4), adam(plain))
    optimizer = adam(model)
    switch = at_once(lr=0.5, back=pf.AtStep(3))
    layers = list(model)  # type: ignore[call-overload]
    (text,) = run(model, switch, range(2), optimizer)
    assert "in Linear: low rank saves only 5.7% of the gradient bytes" in text
    told = str(switch.report)
    assert told.splitlines()[0] == "The switch at step 1 changed no layer: 144,640 parameters"
    assert text in told
    assert not switch.low_rank
    assert repr(switch).endswith("stays dense>")
    assert list(model) == layers  # type: ignore[call-overload]

    pf.Checkpoint(tmp_path, model, optimizer, switch=switch).save(step=2)
    resumed = mostly_embedding()
    other, again = adam(resumed), at_once(lr=0.5, back=pf.AtStep(3))
    assert pf.Checkpoint(tmp_path, resumed, other, switch=again).resume() is not None
    assert str(again.report) == told
    state = json.loads(json.dumps(switch.state_dict()))
    at_once().restore_(mostly_embedding(), None, state)
    for each, its_optimizer, its_switch in ((model, optimizer, switch), (resumed, other, again)):
        assert run(each, its_switch, range(2, 4), its_optimizer) == []
        for p, q in zip(each.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


def test_ranks_of_the_user_are_applied_even_where_they_save_little() -> None:
    for rank, warns in ((0.25, False), (pf.StableRank(), True)):
        model = mostly_embedding()
        for layer in list(model)[1:]:  # type: ignore[call-overload]
            nn.init.orthogonal_(layer.weight)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert at_once(rank=rank).step(model, None, step=1)
        assert [str(w.message) for w in caught] == [
            "Switch: low rank saves only 5.7% of the gradient bytes; pass lower ranks"
        ] * warns
        assert isinstance(model[1], pf.layers.LowRankLinear)  # type: ignore[index]


def on_two_workers(rank: int, size: int) -> None:
    ddp = DDP(mostly_embedding())
    inner, reducer = ddp.module, ddp.reducer
    texts = run(ddp, at_once(), range(3), adam(ddp))
    assert len(texts) == 1 - rank
    assert ddp.module is inner
    assert ddp.reducer is reducer

    def shard(model: nn.Module) -> None:
        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)

    mesh = init_device_mesh("cpu", (size,))
    sharded = mostly_embedding()
    shard(sharded)
    optimizer, switch = adam(sharded), at_once()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            same = switch.rebuild(sharded, optimizer, build=mostly_embedding, shard=shard, step=step)
            assert same == (sharded, optimizer)
            update(sharded, optimizer, step)
    assert len([w for w in caught if "stays dense" in str(w.message)]) == 1 - rank
    assert switch.report is not None
    assert all(whole(p).isfinite().all() for p in parameters(sharded).values())


def test_on_two_workers() -> None:
    in_processes(on_two_workers, 2)


def settling(resume_at: int | None, seed: int = 0) -> tuple[Any, list[Tensor]]:
    """A run of epochs of three steps that observes ranks; killed after step `resume_at` and resumed there."""
    when = pf.RanksSettle(window=2, span=2, tolerance=0.2)

    def build() -> tuple[nn.Module, torch.optim.Optimizer, pf.Switch]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        return model, torch.optim.SGD(model.parameters(), lr=2.0), pf.Switch(when=when)

    model, optimizer, switch = build()
    for step in range(24):
        epoch = step // 3
        if step == resume_at:
            saved = copy.deepcopy((switch.state_dict(), model.state_dict(), optimizer.state_dict()))
            model, optimizer, switch = build()
            switch.restore_(model, optimizer, saved[0])
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
        if step % 3 == 0 or step == resume_at:
            switch.step(model, optimizer, epoch=epoch)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    assert switch.report is not None
    return switch.report.position, list(model.parameters())


@pytest.mark.filterwarnings("ignore:Switch. switch.step got no total")
@pytest.mark.parametrize("resume_at", [3, 5, 8])
def test_a_run_resumed_inside_an_epoch_observes_it_once(resume_at: int) -> None:
    moment, parameters = settling(None)
    again, same = settling(resume_at)
    assert again == moment
    assert all(torch.equal(p, q) for p, q in zip(parameters, same, strict=True))


def test_with_epoch_and_step_each_epoch_is_observed_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switch = pf.Switch(when=pf.RanksSettle(latest=pf.AtEpoch(100)))
    for step in range(12):
        switch.step(model, optimizer, epoch=step // 4, step=step, total=300)
    assert len(switch.state_dict()["history"]) == 3


@pytest.mark.parametrize("frozen", [(False, True), (True, False)])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_layer_is_frozen_or_unfrozen_on_the_way(frozen: tuple[bool, bool], resumed: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switch = pf.Switch(when=pf.RanksSettle(latest=pf.AtEpoch(14)))
    for epoch in range(15):
        model[0].requires_grad_(not frozen[epoch >= 5])
        if resumed and epoch == 6:
            state = switch.state_dict()
            switch = pf.Switch(when=pf.RanksSettle(latest=pf.AtEpoch(14)))
            switch.restore_(model, optimizer, state)
        switch.step(model, optimizer, epoch=epoch, total=30)
    assert switch.report is not None
    if frozen[0]:
        assert switch.report.plan["0"].rank is None
