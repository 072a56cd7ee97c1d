"""The switch in an Accelerate loop: compared with a plain one, with save_state, with a hook, on two processes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    extract_model_from_parallel,
)
from adapters import BATCH, EPOCHS, SAMPLES, Register, build, same, samples
from torch import nn

import pufferfish as pf
from processes import as_torchrun, free_port, in_processes, preload, same_everywhere
from pufferfish.integrations.accelerate import HookKwargs, checkpoint_with

preload("accelerate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
Run = tuple[Accelerator, pf.Switch, nn.Module, Any, Any, Any]


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def prepared(accelerator: Accelerator, batch: int = BATCH) -> Run:
    model = build()
    optimizer, schedule = optimizer_of(model)
    loader = torch.utils.data.DataLoader(samples(), batch)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1), lr=0.5)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    checkpoint_with(accelerator, switch, model, optimizer)
    return accelerator, switch, model, optimizer, schedule, loader


def trained(run: Run, epochs: range = range(EPOCHS), folder: Path | None = None) -> nn.Module:
    accelerator, switch, model, optimizer, schedule, loader = run
    for epoch in epochs:
        switch.step(model, optimizer, epoch=epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(str(folder / str(epoch)))
    assert any(isinstance(m, pf.layers.LowRank) for m in model.modules())
    return model


def by_hand(accumulate: int = 1, size: int = 1) -> nn.Module:
    """Accelerate steps the schedule once for every process."""
    model, data = build(), samples()
    optimizer, schedule = optimizer_of(model)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1), lr=0.5)
    for epoch in range(EPOCHS):
        switch.step(model, optimizer, epoch=epoch)
        for i in range(0, SAMPLES, BATCH):
            x, y = (
                torch.stack([s[0] for s in data[i : i + BATCH]]),
                torch.tensor([s[1] for s in data[i : i + BATCH]]),
            )
            (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
            if (i // BATCH + 1) % accumulate == 0:
                optimizer.step()
                for _ in range(size):
                    schedule.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_a_plain_loop(accumulate: int) -> None:
    plugin = GradientAccumulationPlugin(accumulate, adjust_scheduler=False)
    same(trained(prepared(Accelerator(cpu=True, gradient_accumulation_plugin=plugin))), by_hand(accumulate))


def test_mixed_precision_stays_on() -> None:
    run = prepared(Accelerator(cpu=True, mixed_precision="bf16"))
    seen: list[torch.dtype] = []
    model = trained(run)
    model[0].down.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x = torch.randn(2, 64)
    assert model(x).dtype == torch.float32
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(plain(x), model(x), rtol=0.05, atol=0.05)
    assert seen == [torch.bfloat16, torch.float32, torch.float32]
    assert "forward" in vars(model)


def test_resumes_before_and_after_the_switch(tmp_path: Path) -> None:
    whole = trained(prepared(Accelerator(cpu=True)), folder=tmp_path)
    for epoch in (0, 1):
        run = prepared(Accelerator(cpu=True))
        run[0].load_state(str(tmp_path / str(epoch)))
        same(whole, trained(run, range(epoch + 1, EPOCHS)))
        assert run[1].report is not None
    low_rank = run[0]
    with pytest.raises(ValueError, match="the model's 2 low-rank layers, or their ranks, do not match"):
        low_rank.load_state(str(tmp_path / "0"))
    (tmp_path / "0" / "switch.json").unlink()  # as a run without a switch saves it
    run = prepared(Accelerator(cpu=True))
    run[0].load_state(str(tmp_path / "0"))
    same(whole, trained(run, range(1, EPOCHS)))


def test_accelerate_recognizes_the_handler() -> None:
    kwargs = HookKwargs(register=print, find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    assert accelerator.ddp_handler is kwargs
    assert kwargs.to_kwargs() == {"find_unused_parameters": True}
    with pytest.raises(ValueError, match="only pass one"):
        Accelerator(cpu=True, kwargs_handlers=[kwargs, DistributedDataParallelKwargs()])


def trains_and_resumes(rank: int, size: int, folder: str, port: int) -> None:
    as_torchrun(rank, size, port)
    register = Register()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[HookKwargs(register=register, bucket_cap_mb=1)])
    run = prepared(accelerator, BATCH // size)
    whole = trained(run, folder=Path(folder))
    assert register.seen == [whole]
    assert whole.bucket_bytes_cap == 2**20
    for p in whole.parameters():
        assert same_everywhere(p)
    # Signs of factors depend on the worker that computed the SVD: compare outputs.
    x = torch.stack([s[0] for s in samples()])
    torch.testing.assert_close(whole(x), by_hand(size=size)(x), rtol=1e-3, atol=1e-3)
    for epoch in (0, 1):
        accelerator.free_memory()  # it saves and loads all prepared objects
        accelerator._save_model_state_pre_hook.clear()
        accelerator._load_model_state_pre_hook.clear()
        run = prepared(accelerator, BATCH // size)
        accelerator.load_state(str(Path(folder, str(epoch))))
        same(whole, trained(run, range(epoch + 1, EPOCHS)))


@pytest.mark.timeout(240)  # the hang guard
def test_two_processes(tmp_path: Path) -> None:
    in_processes(trains_and_resumes, 2, str(tmp_path), free_port())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(str(tmp_path / "run"), epochs=3)
    assert "Switched to low rank at epoch 2" in capsys.readouterr().out
    main(str(tmp_path / "run"), epochs=4)  # resumes from a low-rank checkpoint
    assert "Switched" not in capsys.readouterr().out
    assert len(EXAMPLE.read_text().splitlines()) <= 40
