"""Accuracy on real CIFAR-10: ResNet-18 dense, low-rank from the start, and through the switch.

    python benchmarks/cifar10.py --data FOLDER [--seeds 3] [--epochs 30]

FOLDER holds the official binary batches (data_batch_1.bin … test_batch.bin). One recipe for all: bf16 autocast,
channels-last, batch 512, Nesterov SGD, LR 0 → 0.4 over the first fifth and linearly to 0, weight decay 5e-4 not on 1-D
tensors, label smoothing 0.1, random crops and flips on the device. Test accuracy after the last epoch, nothing selected on
it. Differences to the dense run of the same seed (same initialisation, same batches), with 95 % intervals.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import REFERENCES
from pufferfish.table import aligned

BATCH = 512
KEEP = REFERENCES["resnet18"].keep
# Two-sided 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}


def variants(epochs: int) -> dict[str, Callable[[], pf.Switch | None]]:
    third = epochs // 3
    return {
        "dense": lambda: None,
        "hybrid from the start, ratio 0.25": lambda: pf.Switch(rank=0.25, keep=KEEP, when=pf.AtEpoch(0)),
        f"warm-up {third}, ratio 0.25": lambda: pf.Switch(rank=0.25, keep=KEEP, when=pf.AtEpoch(third)),
        f"warm-up {third}, stable ranks": lambda: pf.Switch(when=pf.AtEpoch(third)),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data", type=Path, required=True)
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--epochs", type=int, default=30)
    arguments = ask.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}"
    )
    print(f"ResNet-18, {arguments.epochs} epochs, {arguments.seeds} seeds\n", flush=True)
    data = load(arguments.data, device)
    found: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for seed in range(arguments.seeds):
        for variant, make in variants(arguments.epochs).items():
            start = time.perf_counter()
            accuracy, sizes[variant] = train(data, make(), seed, arguments.epochs, device)
            found.setdefault(variant, []).append(accuracy)
            print(
                f"seed {seed}  {variant:34} {accuracy:.2f} %  {time.perf_counter() - start:.0f} s", flush=True
            )
    print()
    print(table(found, sizes))


def load(folder: Path, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(names: list[str]) -> tuple[Tensor, Tensor]:
        raw = np.concatenate([np.fromfile(folder / f"{n}.bin", np.uint8).reshape(-1, 3073) for n in names])
        images = torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32)).to(device).float()
        mean, std = (
            torch.tensor(x, device=device).view(3, 1, 1) for x in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
        )
        images = ((images - mean) / std).to(memory_format=torch.channels_last)
        return images, torch.from_numpy(raw[:, 0].astype(np.int64)).to(device)

    return *read([f"data_batch_{i}" for i in range(1, 6)]), *read(["test_batch"])


def train(
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    switch: pf.Switch | None,
    seed: int,
    epochs: int,
    device: torch.device,
) -> tuple[float, int]:
    """One run; returns the test accuracy in per cent and the number of parameters at the end."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model = REFERENCES["resnet18"].build().to(device, memory_format=torch.channels_last)
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = len(images) // BATCH
    total, rise = epochs * steps, epochs * steps // 5
    generator = torch.Generator(device).manual_seed(seed)
    for epoch in range(epochs):
        if switch is not None:
            switch.step(model, optimizer, epoch=epoch, total=epochs)
        model.train()
        shuffled = torch.randperm(len(images), generator=generator, device=device)
        seen = augmented(images, generator)
        for i in range(steps):
            now = epoch * steps + i
            for group in optimizer.param_groups:
                group["lr"] = 0.4 * min(now / rise, (total - now) / (total - rise))
            some = shuffled[i * BATCH : (i + 1) * BATCH]
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(seen[some]), labels[some], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return evaluate(model, test_images, test_labels), sum(p.numel() for p in model.parameters())


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image shifted by up to 4 pixels and mirrored or not, anew each epoch."""
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    n, device = len(images), images.device
    x, y = (
        torch.randint(9, (n, 1), generator=generator, device=device) + torch.arange(32, device=device)
        for _ in range(2)
    )
    x = torch.where(torch.rand(n, 1, generator=generator, device=device) < 0.5, x, x.flip(1))
    rows = torch.arange(n, device=device)
    shifted = padded.permute(0, 2, 3, 1)[rows[:, None, None], y[:, :, None], x[:, None, :]]
    return shifted.permute(0, 3, 1, 2)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = 0
    for x, y in zip(images.split(2000), labels.split(2000), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16):
            right += int((model(x).argmax(1) == y).sum())
    return 100 * right / len(labels)


def table(found: dict[str, list[float]], sizes: dict[str, int]) -> str:
    rows = [["", "parameters", "accuracy", "difference to dense"]]
    dense = found["dense"]
    for variant, accuracies in found.items():
        mean = f"{statistics.mean(accuracies):.2f} %"
        gaps = [a - b for a, b in zip(accuracies, dense, strict=True)]
        difference = ""
        if variant != "dense":
            difference = f"{statistics.mean(gaps):+.2f}"
            if len(gaps) > 1:
                half = STUDENT[min(len(gaps) - 1, 5)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
                difference += f" ± {half:.2f}"
        rows.append([variant, f"{sizes[variant]:,}", mean, difference])
    return aligned(rows, left=(0,))


if __name__ == "__main__":
    main()
