"""The switch in an Accelerate loop: against a plain one, through save_state, with a hook, on two processes."""

from __future__ import annotations

import runpy
import subprocess
import sys
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
from adapters import BATCH, EPOCHS, SAMPLES, Register, as_launched, build, same, samples
from torch import nn

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.integrations.accelerate import HookKwargs, checkpoint_with
from pufferfish.optim.rewarm import Rewarm

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
Run = tuple[Accelerator, pf.Switch, nn.Module, Any, Any, Any]


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def prepared(accelerator: Accelerator, batch: int = BATCH) -> Run:
    model = build()
    optimizer, schedule = optimizer_of(model)
    loader = torch.utils.data.DataLoader(samples(), batch)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1), lr=Rewarm(3))
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
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1), lr=Rewarm(3))
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


def test_resumes_from_both_sides(tmp_path: Path) -> None:
    whole = trained(prepared(Accelerator(cpu=True)), folder=tmp_path)
    for epoch in (0, 1):
        run = prepared(Accelerator(cpu=True))
        run[0].load_state(str(tmp_path / str(epoch)))
        same(whole, trained(run, range(epoch + 1, EPOCHS)))
        assert run[1].report is not None
    low_rank = run[0]
    with pytest.raises(ValueError, match="model is low-rank in 2 layers"):
        low_rank.load_state(str(tmp_path / "0"))
    (tmp_path / "0" / "switch.json").unlink()  # as an ordinary run saves it
    run = prepared(Accelerator(cpu=True))
    run[0].load_state(str(tmp_path / "0"))
    same(whole, trained(run, range(1, EPOCHS)))


def test_the_handler_is_taken_for_accelerates_own() -> None:
    kwargs = HookKwargs(register=print, find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    assert accelerator.ddp_handler is kwargs
    assert kwargs.to_kwargs() == {"find_unused_parameters": True}
    assert HookKwargs(comm_hook="bf16").to_kwargs() == {}
    with pytest.raises(ValueError, match="only pass one"):
        Accelerator(cpu=True, kwargs_handlers=[kwargs, DistributedDataParallelKwargs()])


def test_the_package_alone_imports_none_of_these_libraries() -> None:
    code = "import sys, pufferfish; print({'accelerate', 'transformers', 'lightning', 'pytorch_lightning'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def cases(rank: int, size: int, folder: str, port: int) -> None:
    as_launched(rank, size, port)
    register = Register()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[HookKwargs(register=register, bucket_cap_mb=1)])
    run = prepared(accelerator, BATCH // size)
    whole = trained(run, folder=Path(folder))
    assert register.seen == [whole]
    assert whole.bucket_bytes_cap == 2**20
    for p in whole.parameters():
        assert same_everywhere(p)
    # Signs of factors depend on the rank that computed the SVD: compare what they compute.
    x = torch.stack([s[0] for s in samples()])
    torch.testing.assert_close(whole(x), by_hand(size=size)(x), rtol=1e-3, atol=1e-3)
    for epoch in (0, 1):
        accelerator.free_memory()  # it saves and loads what it has prepared
        accelerator._save_model_state_pre_hook.clear()
        accelerator._load_model_state_pre_hook.clear()
        run = prepared(accelerator, BATCH // size)
        accelerator.load_state(str(Path(folder, str(epoch))))
        same(whole, trained(run, range(epoch + 1, EPOCHS)))


@pytest.mark.timeout(240)  # the hang guard
def test_two_processes(tmp_path: Path, free_port: int) -> None:
    in_processes(cases, 2, str(tmp_path), free_port)


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(str(tmp_path / "run"), epochs=3)
    assert "Switched to low rank at epoch 2" in capsys.readouterr().out
    main(str(tmp_path / "run"), epochs=4)  # goes on from the end of the first, which is low-rank
    assert "Switched" not in capsys.readouterr().out
    assert len(EXAMPLE.read_text().splitlines()) < 40
