"""A resumed run is the run that was never stopped, and no accident costs more than the last few steps."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.checkpoint import Checkpoint, folders
from pufferfish.checkpoint.control import Sigterm

SWITCH, TOTAL = 4, 7


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


class Loader:
    """A position in the data: what `data=` saves."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.count = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.count += 1
        x = torch.randn(6, 2, 4, 4, generator=self.generator)
        return x, torch.randint(4, (6,), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.generator.set_state(state["generator"])


class Run:
    """All objects of a training job, fresh, and its loop."""

    def __init__(
        self, make: Callable[[nn.Module, Run], Any], folder: Path, seed: int, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model, self.loader = build(), Loader()
        self.scheduler: Any = None
        self.scaler: Any = None
        self.amp = False
        self.optimizers = make(self.model, self)
        self.switch = pf.Switch(rank=0.25, when=pf.AtStep(SWITCH))
        self.checkpoint = Checkpoint(
            folder, self.model, self.optimizers, switch=self.switch, scheduler=self.scheduler,
            scaler=self.scaler, data=self.loader, **options,
        )  # fmt: skip

    def go(self, start: int, stop: int, after_switch: bool = False) -> Run:
        """With `after_switch` it saves right behind the switch, before the step's update."""
        for step in range(start, stop):
            if self.switch.step(self.model, self.optimizers, step=step) and after_switch:
                self.checkpoint.save(step=step)
                break
            self.update()
            self.checkpoint.step(step=step + 1)
        self.checkpoint.close()
        return self

    def update(self) -> None:
        x, y = self.loader.next()
        x = x + 0.01 * random.random() + 0.01 * np.random.rand()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = nn.functional.cross_entropy(self.model(x), y)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        for optimizer in self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()
        for scheduler in self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]:
            if scheduler is not None:
                scheduler.step()

    def everything(self) -> list[Any]:
        optimizers = self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]
        schedulers = self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]
        return [
            dict(self.model.state_dict()),
            [optimizer.state_dict() for optimizer in optimizers],
            [scheduler and scheduler.state_dict() for scheduler in schedulers],
            self.scaler and self.scaler.state_dict(),
            self.switch.state_dict(),
            self.loader.state_dict(),
            [torch.rand(3), random.random(), np.random.rand()],
        ]


def equal(a: Any, b: Any, at: str = "") -> None:
    """Same structure, same bits."""
    assert type(a) is type(b), at
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, at
        assert a.stride() == b.stride(), at
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert set(a) == set(b), at
        for key in a:
            equal(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            equal(x, y, f"{at}/{i}")
    else:
        assert a == b, at


def momentum(model: nn.Module, run: Run) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    run.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=TOTAL + 1)
    return optimizer


def adamw(model: nn.Module, run: Run) -> Any:
    decayed = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], amsgrad=True)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return optimizer


def fused(model: nn.Module, run: Run) -> Any:
    return torch.optim.AdamW(model.parameters(), fused=True)


def two_optimizers(model: nn.Module, run: Run) -> Any:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.RMSprop([*model[7].parameters(), *model[5].parameters(), *model[1].parameters()])
    run.scheduler = [torch.optim.lr_scheduler.MultiStepLR(x, [2, 5]) for x in (first, second)]
    return [first, second]


def mixed_precision(model: nn.Module, run: Run) -> Any:
    run.amp, run.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return torch.optim.NAdam(model.parameters())


@pytest.mark.parametrize("make", [momentum, adamw, fused, two_optimizers, mixed_precision])
def test_resuming_is_not_stopping(make: Callable[..., Any], tmp_path: Path) -> None:
    straight = Run(make, tmp_path / "never", 0).go(0, TOTAL).everything()
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


def test_a_model_that_is_low_rank_already_resumes(tmp_path: Path) -> None:
    straight = Run(momentum, tmp_path / "never", 0).go(0, TOTAL).everything()
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
    equal(fresh.go(6, TOTAL).everything(), straight)


def test_low_rank_by_hand_needs_no_switch(tmp_path: Path) -> None:
    model = build()
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


def test_plan_in(tmp_path: Path) -> None:
    assert Checkpoint.plan_in(tmp_path / "none") is None
    Run(momentum, tmp_path, 0, every=1).go(0, SWITCH)
    assert Checkpoint.plan_in(tmp_path) is None
    run = Run(momentum, tmp_path, 0, every=1).go(0, SWITCH + 1)
    assert run.switch.report is not None
    assert Checkpoint.plan_in(tmp_path) == run.switch.report.plan


def test_a_compiled_model(tmp_path: Path) -> None:
    model = build()
    Checkpoint(tmp_path, torch.compile(model, backend="eager")).save()
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), nn.DataParallel):
        other = build()
        Checkpoint(tmp_path, wrap(other)).resume()
        equal(dict(other.cpu().state_dict()), dict(model.state_dict()))  # DataParallel moves it where it can


def test_averaged_models_come_along(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="it has 1 averaged models, here are 0; give also="):
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


def test_optimizer_state_goes_by_name_and_keeps_its_dtype(tmp_path: Path) -> None:
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
    """Steps stay where fused and capturable optimizers keep them, and dropout goes on drawing the same."""
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
def test_control_messages_beside_nccl(tmp_path: Path) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with Checkpoint(tmp_path / "a", nn.Linear(2, 2).cuda(), every=1) as checkpoint:
            assert not checkpoint.step(step=1)
            assert checkpoint.resume() is not None
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_missing_on_either_side_is_said(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    Checkpoint(tmp_path, model, optimizer, scheduler=scheduler).save(epoch=3, note="über", loss=math.inf)
    with pytest.warns(UserWarning, match="starts anew"):
        at = Checkpoint(tmp_path, model, optimizer, data=Loader()).resume()
    assert at is not None
    assert at.position == {"epoch": 3, "note": "über", "loss": math.inf}
    assert at.reset == ["data (none was saved)", "scheduler (none was given)"]


def test_nothing_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert Checkpoint(folder, build()).resume() is None


def other_model(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = build()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: other_model(lambda m: m.append(nn.Linear(4, 4))), None, "it lacks 8.weight"),
        (lambda: other_model(lambda m: m.__delitem__(7)), None, "it has 7.weight"),
        (lambda: other_model(lambda m: m.__setitem__(7, nn.Linear(64, 5))), None, "7.weight is 4×64 float32 there and 5×64 float32 in"),
        (lambda: build().double(), None, "0.weight is 16×2×3×3 float32 there and 16×2×3×3 float64 in"),
        (lambda: build().to("meta"), None, "0.weight is on the meta device"),
        (build, lambda m: torch.optim.Adam(m.parameters()), "the saved optimizer is SGD, this one is Adam"),
        (build, lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()]), "SGD has 1 groups, this one has 8"),
        (build, lambda m: torch.optim.SGD(m[0].parameters()), r"SGD, group 0: 1.bias is in the saved one only"),
        (build, lambda m: [torch.optim.SGD(m.parameters())] * 2, "it has 1 optimizers, here are 2"),
        (build, lambda m: torch.optim.SGD([torch.zeros(3, requires_grad=True)]), "SGD, group 0: it holds a 3 parameter that the model does"),
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(model: Any, optimizer: Any, message: str, tmp_path: Path) -> None:
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


# What is kept, and in which order.


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_ones_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpoint(tmp_path, model, every=5, keep=2) as checkpoint:
        for epoch in range(2):
            for step in range(1, 13):  # counts from the start of the epoch
                assert not checkpoint.step(step=step, epoch=epoch)
        assert names(tmp_path) == ["000003-step-5", "000004-step-10"]
        checkpoint.save(epoch=2)
        assert names(tmp_path) == ["000004-step-10", "000005"]
        at = checkpoint.resume()
        assert at is not None
        assert at.position == {"epoch": 2}
        assert at.folder == tmp_path / "000005"
    with Checkpoint(tmp_path, model, every=2, keep=None) as checkpoint:
        for _ in range(7):
            checkpoint.step()
    assert names(tmp_path) == ["000004-step-10", "000005", "000006", "000007", "000008"]
    files = {file.suffix for path in tmp_path.iterdir() for file in path.iterdir()}
    assert files == {".json", ".safetensors"}


def test_settings_are_checked(tmp_path: Path) -> None:
    for settings in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="it counts from 1"):
            Checkpoint(tmp_path, nn.Linear(1, 1), **settings)
    with pytest.raises(TypeError, match="data: a list has no state_dict"):
        Checkpoint(tmp_path, nn.Linear(1, 1), data=[1])
    with pytest.raises(ValueError, match="neither"):
        Checkpoint(tmp_path, nn.Linear(1, 1)).resume(damaged="whatever")  # type: ignore[arg-type]


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    for name in (f"{host}.{dead.pid}.a", f"{host}.{os.getpid()}.b", "elsewhere.example.17.c"):
        (tmp_path / f".writing.{name}").mkdir()
    os.utime(tmp_path / ".writing.elsewhere.example.17.c", (0, 0))
    alive = {f".writing.{host}.{os.getppid()}.d", ".writing.elsewhere.12.e", ".writing"}
    for name in alive:
        (tmp_path / name).mkdir()
    Checkpoint(tmp_path, nn.Linear(2, 2)).save()
    assert set(names(tmp_path)) == alive | {"000001"}


# Damage.


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def edit(file: Path) -> None:
    file.write_text(file.read_text().replace('"world": 1', '"world": 2'))


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("model.safetensors", flip, "model.safetensors: damaged, its SHA-256"),
        ("optimizer.safetensors", cut, "optimizer.safetensors: damaged, .* bytes instead of"),
        ("training.json", Path.unlink, "training.json: damaged, the file is missing"),
        ("rank-00000.json", flip, "rank-00000.json: damaged, its SHA-256"),
        ("manifest.json", Path.unlink, "damaged, there is no manifest.json"),
        ("manifest.json", cut, None),  # only its last line end: still whole
        ("manifest.json", edit, "manifest.json: damaged, or not written"),
        ("manifest.json", lambda f: f.write_text("[]"), "manifest.json: damaged, or not written"),
        ("manifest.json", lambda f: f.write_bytes(b"\xff\xfe"), "manifest.json: damaged, or not written"),
    ],
)
def test_a_damaged_one_is_named(file: str, harm: Any, message: str | None, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with Checkpoint(tmp_path, model, torch.optim.Adam(model.parameters())) as checkpoint:
        checkpoint.save(step=1)
        old = model.weight.detach().clone()
        nn.init.zeros_(model.weight)
        newest = checkpoint.save(step=2)
        nn.init.ones_(model.weight)
        harm(newest / file)
        if message is None:
            assert checkpoint.resume() is not None
            return
        with pytest.raises(ValueError, match=rf'000002-step-2.*{message}.*; damaged="previous" goes on'):
            checkpoint.resume()
        assert model.weight.eq(1).all()
        with pytest.warns(UserWarning, match=rf"000002-step-2.*{message}.* going on from the one before"):
            at = checkpoint.resume(damaged="previous")
        assert at is not None
        assert at.position == {"step": 1}
        assert torch.equal(model.weight, old)
        checkpoint.save(step=2)  # and on: the next one is the newest
        at = checkpoint.resume()
        assert at is not None
        assert at.folder.name == "000003-step-2"


def test_all_damaged(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        flip(checkpoint.save() / "model.safetensors")
        with (
            pytest.warns(UserWarning, match="going on"),
            pytest.raises(ValueError, match="none of its 1 checkpoints is whole"),
        ):
            checkpoint.resume(damaged="previous")


def test_a_later_format_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        monkeypatch.setattr(folders, "_VERSION", 2)
        checkpoint.save()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="format 2, this pufferfish reads 1"):
            checkpoint.resume()


# Accidents while writing.


def killed_at(event: int, work: Callable[[], Any]) -> bool:
    """Run `work` in a copy of this process that is SIGKILLed at its n-th file operation. Whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(name: str, _: Any) -> None:
            nonlocal count
            if name == "open" or name.startswith(("os.", "shutil.")):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
@pytest.mark.filterwarnings("ignore:This process")  # fork with threads, from Python 3.12 on
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    checkpoint = Checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()), keep=1)
    nn.init.constant_(model.weight, 1.0)
    checkpoint.save(step=1)
    newest, event = 1, 0
    seen = set()

    def write() -> None:
        nn.init.constant_(model.weight, newest + 1.0)
        checkpoint.save(step=newest + 1)

    while True:
        event += 1
        was_killed = killed_at(event, write)
        at = checkpoint.resume()
        assert at is not None
        step = at.position["step"]
        assert step in (newest, newest + 1)
        assert model.weight.eq(step).all()
        seen.add(step - newest)
        newest = step
        if not was_killed:
            break
    assert event > 15
    assert seen == {0, 1}
    checkpoint.save(step=newest + 1)
    assert len(names(tmp_path)) == 1  # nothing left behind
    checkpoint.close()


@contextlib.contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "200k"):
        for rows in (50, 250):  # 40 kB fit twice; 200 kB do not fit beside them
            model = nn.Linear(200, rows)
            with Checkpoint(tmp_path / "disk" / "a", model) as checkpoint:
                if rows == 50:
                    checkpoint.save(step=1)
                    small = model
                else:
                    with pytest.raises(OSError, match=r"model.safetensors.*No space left on device"):
                        checkpoint.save(step=2)
        assert names(tmp_path / "disk" / "a") == ["000001-step-1"]
        with Checkpoint(tmp_path / "disk" / "a", small) as checkpoint:
            assert checkpoint.resume() is not None
            # Full to the last byte: not even the small files fit.
            ballast = tmp_path / "disk" / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(step=3)
            assert names(tmp_path / "disk" / "a") == ["000001-step-1"]
            ballast.unlink()
            checkpoint.save(step=3)  # and on, once there is room


def test_a_read_only_folder(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, "200k"), Checkpoint(disk, nn.Linear(2, 2)) as checkpoint:
        checkpoint.save(step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            checkpoint.save(step=2)
        assert names(disk) == ["000001-step-1"]
        assert checkpoint.resume() is not None


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoint = Checkpoint(tmp_path / "file" / "a", nn.Linear(2, 2))
    with checkpoint, pytest.raises(OSError, match="Not a directory"):
        checkpoint.save()


def test_a_value_that_cannot_be_saved(tmp_path: Path) -> None:
    loader = Loader()
    with Checkpoint(tmp_path, nn.Linear(2, 2), data=loader) as checkpoint:
        checkpoint.save(step=1)
        loader.count = {1, 2}  # type: ignore[assignment]
        with pytest.raises(TypeError, match="parts/data/count is a set"):
            checkpoint.save(step=2)
        loader.count = 1
        for position in ({"at": tmp_path}, {"step": 3.0}, {"step": -1}, {"loss": torch.ones(1)}):
            with pytest.raises(TypeError, match=f"{next(iter(position))}=.*: a position is numbers and text"):
                checkpoint.save(**position)
        assert names(tmp_path) == ["000001-step-1"]


# SIGTERM.


def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with Checkpoint(tmp_path, nn.Linear(2, 2), every=100) as checkpoint:
            for step in range(1, 10):
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if checkpoint.step(step=step):
                    break
            assert step == 3
            assert names(tmp_path) == ["000001-step-3"]
            assert heard == [signal.SIGTERM]  # whoever listened before still hears it
        assert signal.getsignal(signal.SIGTERM) is mine
        with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
            assert not checkpoint.step(step=4)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # somebody else's by now
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forgotten_checkpoint_gives_sigterm_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = Checkpoint(tmp_path, nn.Linear(2, 2))
    assert signal.getsignal(signal.SIGTERM) != before
    del checkpoint
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.filterwarnings("ignore:This process")  # fork with threads, from Python 3.12 on
def test_a_forked_child_still_dies_of_sigterm(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, nn.Linear(2, 2)) as checkpoint:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not checkpoint.step()


def test_only_the_main_thread_listens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    made: list[Sigterm] = []
    thread = threading.Thread(target=lambda: made.append(Sigterm()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    made[0].close()
    assert not made[0].seen


def test_made_too_early(tmp_path: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with Checkpoint(tmp_path / "a", nn.Linear(2, 2)) as checkpoint:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            with pytest.raises(RuntimeError, match="made before init_process_group"):
                checkpoint.save()
        finally:
            torch.distributed.destroy_process_group()
