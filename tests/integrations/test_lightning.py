"""The Lightning Trainer compared with a plain loop, resumed before and after the switch, on one and two processes."""

from __future__ import annotations

import csv
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from adapters import BATCH, EPOCHS, SAMPLES, Register, build, same, samples
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

import pufferfish as pf
from processes import as_torchrun, free_port, in_processes, preload, same_everywhere
from pufferfish.integrations.lightning import SwitchCallback
from pufferfish.switching.moments import Position

preload("lightning.pytorch", "pytorch_lightning")
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_module.py"


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(batch: int = BATCH) -> Any:
    return DataLoader(samples(), batch)


def make(switch: pf.Switch, folder: Path, *callbacks: Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }  # fmt: skip
    register = options.pop("register", None)
    return pl.Trainer(
        **settings | options,
        default_root_dir=folder,
        callbacks=[SwitchCallback(switch, register=register), *callbacks],
    )


def by_hand(switch: pf.Switch, accumulate: int = 1) -> nn.Module:
    model, data, steps = build(), samples(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(EPOCHS):
        if isinstance(switch.when, pf.AtEpoch):
            switch.step(model, optimizer, epoch=epoch)
        for i in range(0, SAMPLES, BATCH):
            if isinstance(switch.when, pf.AtStep):
                switch.step(model, optimizer, step=steps)
            x, y = zip(*data[i : i + BATCH], strict=True)
            loss = nn.functional.cross_entropy(model(torch.stack(x)), torch.tensor(y))
            (loss / accumulate).backward()
            if (i // BATCH + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        schedule.step()
    return model


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")


@pytest.mark.parametrize(
    ("when", "accumulate"),
    [(pf.AtEpoch(1), 1), (pf.AtEpoch(1), 2), (pf.AtStep(2), 2), (pf.AtStep(0), 1), (pf.AtStep(99), 1)],
    ids=str,
)
def test_equals_a_plain_loop(when: Any, accumulate: int, tmp_path: Path) -> None:
    switch, other = pf.Switch(rank=0.25, when=when), pf.Switch(rank=0.25, when=when)
    net = Net()
    make(switch, tmp_path, accumulate_grad_batches=accumulate).fit(net, loader())
    same(net.layers, by_hand(other, accumulate))
    assert (switch.report is None) == (other.report is None) == (when == pf.AtStep(99))
    assert "on_load_checkpoint" not in vars(net)


def test_a_run_that_ends_before_the_switch_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the run ended before the switch \(when=AtEpoch\(n=9\)\)"):
        make(pf.Switch(rank=0.25, when=pf.AtEpoch(9)), tmp_path).fit(Net(), loader())


def test_averaged_weights(tmp_path: Path) -> None:
    """EMA beside a plain loop, and resumed before and after the switch."""

    def run(folder: str, **resume: Any) -> Net:
        net, switch = Net(), pf.Switch(rank=0.25, when=pf.AtStep(5))
        saves = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=4, save_top_k=-1)
        make(switch, tmp_path, EMAWeightAveraging(decay=0.9), saves).fit(net, loader(), **resume)
        return net

    net = run("whole")
    model, data, switch = build(), samples(), pf.Switch(rank=0.25, when=pf.AtStep(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9), use_buffers=True
    )
    for step in range(EPOCHS * SAMPLES // BATCH):
        switch.step(model, optimizer, step=step, also=[ema])
        i = step * BATCH % SAMPLES
        x, y = zip(*data[i : i + BATCH], strict=True)
        nn.functional.cross_entropy(model(torch.stack(x)), torch.tensor(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        if i + BATCH == SAMPLES:
            optimizer.param_groups[0]["lr"] *= 0.5
    same(net.layers, ema.module)  # at the end the module has the averaged weights
    for step in (4, 8):
        same(net, run(str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt", weights_only=True))

    swa = Net()
    averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    make(pf.Switch(rank=0.25, when=pf.AtStep(5)), tmp_path, averaging).fit(swa, loader())
    assert type(swa.layers[0]) is pf.layers.LowRankLinear
    assert all(p.isfinite().all() for p in swa.parameters())


def test_the_other_package_and_mixed_precision(tmp_path: Path) -> None:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        training_step, configure_optimizers = Net.training_step, Net.configure_optimizers

    net, switch = Other(), pf.Switch(rank=0.25, when=pf.AtFraction(0.5))
    pytorch_lightning.Trainer(
        max_epochs=2, accelerator="cpu", precision="bf16-mixed", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[SwitchCallback(switch)],
    ).fit(net, loader())  # fmt: skip
    assert switch.report is not None
    assert (switch.report.position.step, switch.report.position.total) == (4, 8)
    assert net.layers[0].up.weight.dtype == torch.float32
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    "when",
    [
        pf.AtStep(6),
        pf.RanksSettle(latest=pf.AtEpoch(2)),
    ],
    ids=lambda when: type(when).__name__,
)
def test_resumes_before_and_after_the_switch(when: Any, tmp_path: Path) -> None:
    def run(folder: str, **resume: Any) -> tuple[Net, pf.Switch]:
        net, switch = Net(), pf.Switch(rank=0.25, when=when, lr=0.5)
        saves = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        make(switch, tmp_path, saves).fit(net, loader(), **resume)
        return net, switch

    net, switch = run("whole")
    assert switch.report is not None
    for step in (2, 4, 8, 10):
        resumed, again = run(str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt", weights_only=True)
        if step % 4 == 0:
            same(net, resumed)
            assert again.state_dict() == switch.state_dict()
        # Inside an epoch Lightning restarts an ordinary loader: other data, but the same schedule.
        assert again.report is not None
        assert again.report.position == switch.report.position
        assert len(again.history) == len(switch.history)


def test_the_switch_is_logged_once(tmp_path: Path) -> None:
    def run(folder: str, **resume: Any) -> tuple[list[dict[str, float]], pf.Switch]:
        switch = pf.Switch(rank=0.25, when=pf.AtStep(5), back=pf.AtStep(9))
        saves = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=4, save_top_k=-1)
        logger = CSVLogger(tmp_path, folder, version="")
        make(switch, tmp_path, saves, logger=logger).fit(Net(), loader(), **resume)
        with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
            rows = csv.DictReader(file)
            return [{key: float(value) for key, value in row.items() if value} for row in rows], switch

    rows, switch = run("whole")
    assert switch.report is not None
    assert [row["step"] for row in rows] == [5, 9]
    assert rows[1] == {"step": 9} | switch.report.metrics  # of the return to full rank
    again, _ = run("resumed", ckpt_path=tmp_path / "whole" / "step=8.ckpt")
    assert [row["step"] for row in again] == [9]


def test_evaluates_a_low_rank_checkpoint(tmp_path: Path) -> None:
    def switch() -> pf.Switch:
        return pf.Switch(rank=0.25, when=pf.AtEpoch(1))

    net, saves = Net(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = make(switch(), tmp_path, saves)
    trainer.fit(net, loader())
    (before,) = trainer.validate(net, loader(), verbose=False)
    (after,) = make(switch(), tmp_path).validate(Net(), loader(), tmp_path / "epoch=2.ckpt", verbose=False)
    assert before == after
    with pytest.raises(ValueError, match="the model's 2 low-rank layers, or their ranks, do not match"):
        make(switch(), tmp_path).fit(net, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    with pytest.raises(ValueError, match="a Shards shards the model"):
        make(switch(), tmp_path, strategy=Shards("cpu")).fit(Net(), loader())


class Stream(IterableDataset[Any]):
    """Batches of unknown number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


@pytest.mark.parametrize(
    ("data", "options", "position"),
    [
        (loader, {"max_epochs": 1}, {"step": 2, "total": 4}),
        (Stream, {"max_steps": 6, "max_epochs": -1}, {"step": 2, "total": 6}),
        (Stream, {}, {"epoch": 1, "step": 4, "total": EPOCHS}),
    ],
    ids=["one epoch", "stream", "epochs of a stream"],
)
def test_automatic_switch(data: Any, options: Any, position: dict[str, int], tmp_path: Path) -> None:
    switch, batches = pf.Switch(rank=0.25, when=pf.RanksSettle()), data()
    if isinstance(batches, Stream):
        batches = DataLoader(batches, None)
    make(switch, tmp_path, **options).fit(Net(), batches)
    assert switch.report is not None
    assert switch.report.position == Position(**position)


class Manual(Net):
    """Two optimizers, which make an update every `accumulate` batches."""

    def __init__(self, accumulate: int) -> None:
        super().__init__()
        self.automatic_optimization, self.accumulate = False, accumulate

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.accumulate == 0:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.layers[:2], self.layers[2:])]


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 7), (4, 8)])
def test_manual_optimization(accumulate: int, batches: int, tmp_path: Path) -> None:
    """Shares of the run are counted in batches, whatever the number of updates; `AtStep` counts updates."""
    moments: dict[Any, int] = {pf.AtFraction(batches / 12): batches, pf.AtStep(2): 2}
    for when, step in moments.items():
        switch = pf.Switch(rank=0.25, when=when)
        make(switch, tmp_path).fit(Manual(accumulate), loader())
        assert switch.report is not None
        assert switch.report.position == Position(step=step, total=12)


class Shards(SingleDeviceStrategy):
    """Claims to shard, as the FSDP strategy does, which needs a GPU."""

    restore_checkpoint_after_setup = True


class Share(Sampler[int]):
    """Every second sample, so that a step of two processes equals one of the plain loop."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), SAMPLES, 2))

    def __len__(self) -> int:
        return SAMPLES // 2


class OnEveryRank(Callback):
    """Checks in the workers; a failure makes `fit` fail."""

    def __init__(self, hooked: list[Any]) -> None:
        self.hooked = hooked

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert dist.get_world_size() == 2
        assert isinstance(pl_module.layers[0], pf.layers.LowRank)
        assert self.hooked == [trainer.strategy.model]
        for name, p in pl_module.named_parameters():
            assert same_everywhere(p), name


@pytest.mark.timeout(240)  # the hang guard
def test_two_processes(tmp_path: Path) -> None:
    """Forked workers: the checks run there, and this process gets the merged weights."""
    register = Register()

    def run(folder: str, **resume: Any) -> Net:
        net, switch = Net(), pf.Switch(rank=0.25, when=pf.AtEpoch(1))
        saves = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1)
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
        make(
            switch, tmp_path, saves, OnEveryRank(register.seen), devices=2, strategy=strategy, register=register,
            use_distributed_sampler=False,
        ).fit(net, DataLoader(samples(), BATCH // 2, sampler=Share()), **resume)  # fmt: skip
        return net

    whole = run("whole")
    for epoch in (0, 1):
        same(whole, run(str(epoch), ckpt_path=tmp_path / "whole" / f"epoch={epoch}.ckpt"))
    alone = by_hand(pf.Switch(rank=0.25, when=pf.AtEpoch(1)))
    x = torch.stack([s[0] for s in samples()])
    torch.testing.assert_close(whole.layers(x), alone(x), rtol=1e-3, atol=1e-3)


def in_fabric(fabric: Fabric, compress: bool = False) -> Any:
    """The loop of `by_hand`; each process takes its share of every batch."""
    net, data, share = build(), samples(), BATCH // fabric.world_size
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
    fabric.launch()
    model, optimizer = fabric.setup(net, adamw)
    if compress:
        pf.compress(model, pf.compression.NoCompression(), optimizer=optimizer)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1))
    for epoch in range(EPOCHS):
        assert switch.step(model, optimizer, epoch=epoch) == (epoch == 1)
        for i in range(share * fabric.global_rank, SAMPLES, BATCH):
            x, y = zip(*data[i : i + share], strict=True)
            fabric.backward(nn.functional.cross_entropy(model(torch.stack(x)), torch.tensor(y)))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return model


def test_fabric() -> None:
    model = in_fabric(Fabric(accelerator="cpu", devices=1))
    same(model.module, by_hand(pf.Switch(rank=0.25, when=pf.AtEpoch(1))))
    pf.merge_(model)
    assert type(model.module[0]) is nn.Linear


def fabric_on_two_processes(rank: int, size: int, port: int) -> None:
    as_torchrun(rank, size, port)
    for compress in (False, True):
        model = in_fabric(Fabric(accelerator="cpu", devices=size, strategy="ddp"), compress)
        assert all(map(same_everywhere, model.parameters()))
        x, alone = torch.stack([s[0] for s in samples()]), by_hand(pf.Switch(rank=0.25, when=pf.AtEpoch(1)))
        torch.testing.assert_close(model(x), alone(x), rtol=1e-3, atol=1e-3)


@pytest.mark.timeout(240)  # the hang guard
def test_fabric_on_two_processes() -> None:
    in_processes(fabric_on_two_processes, 2, free_port())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(str(tmp_path / "run"), epochs=3)
    main(str(tmp_path / "run"), epochs=4)  # resumes from a low-rank checkpoint
    assert capsys.readouterr().out.count("Switched to low rank at epoch 2") == 2
    assert len(EXAMPLE.read_text().splitlines()) < 40
