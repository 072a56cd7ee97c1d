"""Quality: low-rank training on the tasks of the Pufferfish paper, and compressed gradients.

    DATA=FOLDER python benchmarks/quality.py [STUDY ...] [--processes 2]      # run what is missing
    python benchmarks/quality.py [STUDY ...] --show

cifar-small      CIFAR-10, ResNet-18 at half its width, 15 epochs, batch 128: two cores do it in a night.
cifar-paper      The same with the paper's width, 30 epochs, batch 512: for a GPU.
cifar-sparse     ResNet-18 at a quarter of its width, 10 epochs, 8 simulated workers of 64 images: sparsifiers with k = 1 %.
cifar-methods    The same with other methods.
wikitext2        LSTM 2 × 650, tied, 8 epochs: perplexity.
multi30k         Transformer of 6 + 6 layers, German to English, 10 epochs: BLEU.

FOLDER holds the official binary batches of CIFAR-10, and WikiText-2 and Multi30k in folders of their names. One recipe for
all of CIFAR-10: bf16 autocast, channels-last, Nesterov SGD, rate 0 → peak over the first fifth and linearly to 0, weight decay
5e-4 not on 1-D tensors, label smoothing 0.1, random crops and flips. 45,000 images are trained on and 5,000 choose; test
accuracy after the last epoch. The other tasks have the short recipe of the lab with the epochs above.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.compression import BlockRandomK, Method, NoCompression, PowerSGD, RandomK, Settings, TopK
from pufferfish.lab.harness import Job, Row, Study, main
from pufferfish.lab.method_name import PruningMethod, training_method
from pufferfish.lab.models import REFERENCES
from pufferfish.lab.rivals.pruning import build_pruning_change
from pufferfish.lab.tasks import find_task
from pufferfish.lab.train import RunSettings, train
from pufferfish.lab.train.simulated import SimulatedDDP
from pufferfish.measure import read_run

DATA = Path(os.environ.get("DATA", "data"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESNET = REFERENCES["resnet18"]
HELD_OUT = 5_000


@dataclass(frozen=True)
class Arm:
    """A way to a small model."""

    switch: float | None = None  # share of the run before the switch to low rank
    keep: tuple[str, ...] = RESNET.keep
    frobenius: float = 0.0
    narrow: bool = False  # dense, with as many parameters as the hybrid
    early_bird: float = 0.0  # share of the channels to prune
    fp32: bool = False
    method: Method | None = None  # compression of the gradients of simulated workers
    scope: Literal["layer", "global"] = "layer"


LOW_RANK = {
    "dense": Arm(),
    "narrow": Arm(narrow=True),
    "hybrid after a third, Frobenius decay": Arm(switch=1 / 3, frobenius=5e-4),
    "hybrid after a third": Arm(switch=1 / 3),
    "hybrid after a tenth": Arm(switch=0.1),
    "hybrid from scratch": Arm(switch=0.0),
    "low rank everywhere from scratch": Arm(switch=0.0, keep=("conv1", "fc")),
    "Early-Bird": Arm(early_bird=0.3),
    "hybrid after a third, fp32": Arm(switch=1 / 3, fp32=True),
}
K = 0.01
SPARSE = {
    "no compression": Arm(method=NoCompression()),
    "top-k": Arm(method=TopK(K)),
    "top-k, global": Arm(method=TopK(K), scope="global"),
    "random-k": Arm(method=RandomK(K)),
    "random-k, own coordinates": Arm(method=RandomK(K, coordinates="own")),
    "block-random-k": Arm(method=BlockRandomK(K)),
    "block-random-k, own coordinates": Arm(method=BlockRandomK(K, coordinates="own")),
    "block-random-k, global": Arm(method=BlockRandomK(K), scope="global"),
}
METHODS = {
    "no compression": Arm(method=NoCompression()),
    "bf16": Arm(method=pf.compression.BFloat16()),
    "block int8": Arm(method=pf.compression.BlockInt8()),
    "LoCo, 4 bits": Arm(method=pf.compression.LoCo()),
    "PowerSGD(4)": Arm(method=PowerSGD(4)),
    "PowerSGD(4), factors in bf16": Arm(method=PowerSGD(4, bf16=True)),
    "PowerSGD(1)": Arm(method=PowerSGD(1)),
    "sign SGD with error feedback": Arm(method=pf.compression.EFSignSGD()),
    "QSGD": Arm(method=pf.compression.QSGD()),
    "TernGrad": Arm(method=pf.compression.TernGrad()),
    "ATOMO": Arm(method=pf.compression.Atomo()),
}
ARMS = LOW_RANK | SPARSE | METHODS
#: Arms of the other tasks: the lab's method, and the share of the run before the switch.
TASK_ARMS = {
    "dense": "dense",
    "narrow": "narrow",
    "hybrid after a third": "pufferfish",
    "hybrid from scratch": "pufferfish(at=0)",
}


def run(job: Job) -> Row:
    """Train one arm on CIFAR-10; every epoch is saved, but for simulated workers and pruning."""
    settings, arm = job.settings, ARMS[job.arm]
    torch.manual_seed(job.seed)
    width = narrow_width(settings["width"]) if arm.narrow else settings["width"]
    model = RESNET.build(width=width).to(DEVICE, memory_format=torch.channels_last)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs, batch, images = settings["epochs"], settings["batch"], cifar10()
    steps = (len(images["train"][0])) // batch
    switch = rival = None
    if arm.switch is not None:
        plan = pf.plan(model, rank=pf.Ratio(0.25, multiple=8), keep=arm.keep)
        switch = pf.Switch(plan, when=pf.AtEpoch(round(arm.switch * epochs)))
    if arm.frobenius:
        pf.lowrank.FrobeniusDecay(model, optimizer, arm.frobenius)
    if arm.early_bird:
        rival = build_pruning_change(
            PruningMethod(ratio=arm.early_bird), model, optimizer, epochs=epochs, steps_per_epoch=steps
        )
    ddp = None
    if arm.method:
        compressed = Settings(arm.method, scope=arm.scope, seed=job.seed)
        ddp = SimulatedDDP(model, compressed, settings["workers"], optimizer=optimizer)
    simple = not (rival or ddp)
    checkpoint = pf.Checkpoint(job.folder, model, optimizer, switch=switch, keep=1) if simple else None
    resumed = checkpoint.resume() if checkpoint else None
    curve: list[float] = json.loads(resumed.position["curve"]) if resumed else []
    precision = nullcontext() if arm.fp32 else torch.autocast(DEVICE.type, torch.bfloat16)
    for epoch in range(len(curve), epochs):
        if switch:
            switch.step(model, optimizer, epoch=epoch, total=epochs)
        if rival:
            rival.begin_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(batches(*images["train"], batch, job.seed * 1000 + epoch)):
            done = (epoch * steps + i) / (epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = job.rate * min(done / 0.2, (1 - done) / 0.8)
            optimizer.zero_grad()
            if ddp:
                parts = zip(x.chunk(ddp.size), y.chunk(ddp.size), strict=True)
                ddp.backward(partial(smoothed, model, precision), [*parts])
            else:
                smoothed(model, precision, x, y).backward()
            optimizer.step()
            if rival:
                rival.after_step()
        with precision:
            curve.append(accuracy(model, *images["validation"]))
        if checkpoint:
            checkpoint.save(curve=json.dumps(curve))
    with precision:
        test = accuracy(model, *images["test"])
    parameters = sum(p.numel() for p in model.parameters())
    row = {"validation": curve[-1], "test": test, "parameters": parameters, "curve": curve}
    return row | ({"fewer": ddp.meter.plain_wire_bytes / ddp.meter.wire_bytes} if ddp else {})


def smoothed(model: nn.Module, precision: AbstractContextManager[object], x: Tensor, y: Tensor) -> Tensor:
    with precision:
        return F.cross_entropy(model(x), y, label_smoothing=0.1)


def run_task(job: Job) -> Row:
    """Train one arm on a task of the lab; every epoch is saved."""
    task = find_task(job.settings["task"])
    recipe = task.recipe("short").changed(job.settings["recipe"])
    given = RunSettings(
        training_method(TASK_ARMS[job.arm]), replace(recipe, lr=recipe.lr * job.rate), job.folder / "run",
        data=DATA, seed=job.seed, device=DEVICE.type, precision="bf16", quiet=True,
    )  # fmt: skip
    results = train(task, given)
    assert results is not None, "stopped by a signal"
    metrics = read_run(job.folder / "run").metrics
    return {
        "validation": metrics[f"valid/{task.metric}"][-1][2],
        "test": results[f"test/{task.metric}"],
        "parameters": results["parameters"],
    }


def narrow_width(width: float) -> float:
    """Width of the dense model whose number of parameters is closest to the hybrid's."""

    def parameters(width: float) -> int:
        return sum(p.numel() for p in RESNET.build(width=width).parameters())

    with torch.device("meta"):
        wanted = pf.plan(
            RESNET.build(width=width), rank=pf.Ratio(0.25, multiple=8), keep=RESNET.keep
        ).after.parameters
        tried = [width * i / 128 for i in range(8, 129)]
        return min(tried, key=lambda width: abs(parameters(width) - wanted))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    parts = zip(images.split(1000), labels.split(1000), strict=True)
    return 100 * sum(int((model(normalized(x)).argmax(1) == y).sum()) for x, y in parts) / len(labels)


def batches(images: Tensor, labels: Tensor, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch: shuffled, each image shifted by up to 4 pixels and mirrored or not."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    shifts = torch.randint(9, (2, len(images)), generator=generator)
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    order, shifts, mirrored = (x.to(DEVICE) for x in (order, shifts, mirrored))
    pixels = torch.arange(32, device=DEVICE)
    for i in range(0, len(images) - batch + 1, batch):
        padded = F.pad(images[order[i : i + batch]], (4, 4, 4, 4), mode="reflect")
        rows, columns = (shift[i : i + batch, None] + pixels for shift in shifts)
        columns = torch.where(mirrored[i : i + batch, None], columns.flip(1), columns)
        x = padded.permute(0, 2, 3, 1)[
            torch.arange(batch, device=DEVICE)[:, None, None], rows[:, :, None], columns[:, None, :]
        ]
        yield normalized(x.permute(0, 3, 1, 2)), labels[order[i : i + batch]]


def normalized(images: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(x, device=DEVICE).view(3, 1, 1) for x in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
    )
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


@lru_cache
def cifar10() -> dict[str, tuple[Tensor, Tensor]]:
    """The splits, as bytes."""

    def read(names: list[str]) -> tuple[Tensor, Tensor]:
        raw = np.concatenate(
            [np.fromfile(DATA / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names]
        )
        images = torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32)).to(DEVICE)
        return images, torch.from_numpy(raw[:, 0].astype(np.int64)).to(DEVICE)

    images, labels = read([f"data_batch_{i}" for i in range(1, 6)])
    return {
        "train": (images[:-HELD_OUT], labels[:-HELD_OUT]),
        "validation": (images[-HELD_OUT:], labels[-HELD_OUT:]),
        "test": read(["test_batch"]),
    }


def study(size: str, width: float, epochs: int, batch: int, rates: tuple[float, ...]) -> Study:
    return Study(
        name=f"cifar-{size}", run=run, arms=dict.fromkeys(LOW_RANK, rates), baseline="narrow", score="accuracy, %",
        columns={"parameters": ",.0f"}, settings={"width": width, "epochs": epochs, "batch": batch},
    )  # fmt: skip


def simulated(name: str, arms: dict[str, Arm]) -> Study:
    return Study(
        name=f"cifar-{name}", run=run, arms=dict.fromkeys(arms, (0.4,)), baseline="no compression",
        score="accuracy, %", columns={"fewer": ",.1f"},
        settings={"width": 0.25, "epochs": 10, "batch": 512, "workers": 8},
    )  # fmt: skip


def of_task(name: str, options: str, recipe: str, score: str, higher: bool) -> Study:
    return Study(
        name=name, run=run_task, arms=dict.fromkeys(TASK_ARMS, (1.0,)), baseline="narrow", score=score,
        higher=higher, columns={"parameters": ",.0f"},
        settings={"task": f"{name}:{options}".rstrip(":"), "recipe": recipe},
    )  # fmt: skip


STUDIES = [
    study("small", 0.5, 15, 128, (0.1,)), study("paper", 1.0, 30, 512, (0.2, 0.4, 0.8)),
    simulated("sparse", SPARSE), simulated("methods", METHODS),
    of_task("wikitext2", "d=650,dropout=0.5", "epochs=8", "perplexity", higher=False),
    of_task("multi30k", "", "epochs=10", "BLEU", higher=True),
]  # fmt: skip

if __name__ == "__main__":
    main(STUDIES, __doc__)
