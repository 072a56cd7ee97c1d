"""Accuracy on real CIFAR-10: ResNet-18 dense, low-rank from the start, and through the switch in several ways.

    python benchmarks/cifar10.py --data FOLDER [--seeds 0 1 2] [--epochs 30] [--arms dense 'warm-up*'] [--out FILE]
    python benchmarks/cifar10.py --table FILE...

FOLDER holds the official binary batches (data_batch_1.bin … test_batch.bin). One recipe for all: bf16 autocast,
channels-last, batch 512, Nesterov SGD, LR 0 → 0.4 over the first fifth and linearly to 0, weight decay 5e-4 not on 1-D
tensors, label smoothing 0.1, random crops and flips on the device. Test accuracy after the last epoch, nothing selected on
it. Differences are paired by seed (same initialisation, same batches), with 95 % intervals that are not corrected for
the number of comparisons. The arms branch off the dense run of their seed (`paired.py` says how). Seeds may run side by
side in several processes on one GPU, each with its own --out.

Arms: `from scratch` is low-rank everywhere but in the first convolution and the classifier, `hybrid` keeps what the paper
keeps; both from the first step. `warm-up` is the hybrid after a third of the epochs, `stable ranks` the automatic ranks at
the same time, `automatic` is `pf.Switch()` as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paired
import torch
import torch.nn.functional as F
from paired import Arm, Claim
from torch import Tensor

import pufferfish as pf
from pufferfish.lab.models import REFERENCES

RESNET = REFERENCES["resnet18"]
Data = tuple[Tensor, Tensor, Tensor, Tensor]

BENCHMARK = paired.Benchmark(
    name="cifar10",
    measure="accuracy, %",
    digits=2,
    higher=True,
    claims=(
        Claim("the paper: hybrid over from scratch", "hybrid", "from scratch"),
        Claim("the paper: warm-up over hybrid", "warm-up", "hybrid"),
        Claim("moments carried over moments reset", "warm-up", "warm-up, reset"),
        Claim("LR kept over LR halved", "warm-up", "warm-up, LR × 0.5"),
        Claim("Frobenius decay 5e-4 over none, ratio 0.25", "warm-up, Frobenius 5e-4", "warm-up"),
        Claim("Frobenius decay 1e-4 over none, stable ranks", "stable ranks, Frobenius 1e-4", "stable ranks"),
        Claim("Frobenius decay 5e-4 over none, stable ranks", "stable ranks, Frobenius 5e-4", "stable ranks"),
        Claim("stable ranks over ratio 0.25", "stable ranks", "warm-up"),
        Claim("settled ranks over a stated moment", "automatic", "stable ranks"),
        Claim("Frobenius decay 5e-4 over none, automatic", "automatic, Frobenius 5e-4", "automatic"),
    ),
)


def arms(epochs: int) -> dict[str, Arm]:
    third = pf.AtEpoch(epochs // 3)

    def hybrid(**settings: object) -> pf.Switch:
        return pf.Switch(rank=0.25, keep=RESNET.keep, **({"when": third} | settings))

    return {
        "from scratch": Arm(switch=lambda: pf.Switch(rank=0.25, keep=["conv1", "fc"], when=pf.AtEpoch(0))),
        "hybrid": Arm(switch=lambda: hybrid(when=pf.AtEpoch(0))),
        "warm-up": Arm(switch=hybrid),
        "warm-up, reset": Arm(switch=lambda: hybrid(state="reset")),
        "warm-up, LR × 0.5": Arm(switch=lambda: hybrid(lr=0.5)),
        "warm-up, Frobenius 5e-4": Arm(switch=hybrid, decay=5e-4),
        "stable ranks": Arm(switch=lambda: pf.Switch(when=third)),
        "stable ranks, Frobenius 1e-4": Arm(switch=lambda: pf.Switch(when=third), decay=1e-4),
        "stable ranks, Frobenius 5e-4": Arm(switch=lambda: pf.Switch(when=third), decay=5e-4),
        "automatic": Arm(switch=pf.Switch),
        "automatic, Frobenius 5e-4": Arm(switch=pf.Switch, decay=5e-4),
    }


def main() -> None:
    ask = paired.options(__doc__)
    ask.add_argument("--epochs", type=int, default=30)
    ask.add_argument("--batch", type=int, default=512)
    ask.add_argument(
        "--limit", type=int, help="use only so many images of each batch file, to try the script"
    )
    given = ask.parse_args()
    loaded: list[Data] = []

    def start(seed: int, device: torch.device) -> Training:
        if not loaded:
            loaded.append(load(given.data, device, given.limit))
        return Training(loaded[0], seed, given.batch, device)

    paired.main(
        BENCHMARK, given, start, arms(given.epochs), given.epochs,
        epochs=given.epochs, batch=given.batch, limit=given.limit,
    )  # fmt: skip


def load(folder: Path, device: torch.device, limit: int | None) -> Data:
    def read(names: list[str]) -> tuple[Tensor, Tensor]:
        raw = np.concatenate(
            [np.fromfile(folder / f"{n}.bin", np.uint8).reshape(-1, 3073)[:limit] for n in names]
        )
        images = torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32)).to(device).float()
        mean, std = (
            torch.tensor(x, device=device).view(3, 1, 1) for x in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
        )
        images = ((images - mean) / std).to(memory_format=torch.channels_last)
        return images, torch.from_numpy(raw[:, 0].astype(np.int64)).to(device)

    return *read([f"data_batch_{i}" for i in range(1, 6)]), *read(["test_batch"])


class Training(paired.Run):
    """One run; a turn is an epoch."""

    peak = 0.4  # of the learning rate

    def __init__(self, data: Data, seed: int, batch: int, device: torch.device) -> None:
        self.images, self.labels, self.test_images, self.test_labels = data
        self.batch, self.steps = batch, len(data[0]) // batch
        self.device = device
        torch.manual_seed(seed)
        self.model = RESNET.build().to(device, memory_format=torch.channels_last)
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1]},
            {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
        self.generator = torch.Generator(device).manual_seed(seed)

    def advance(self, turn: int, turns: int) -> None:
        self.model.train()
        shuffled = torch.randperm(len(self.images), generator=self.generator, device=self.device)
        seen = augmented(self.images, self.generator)
        for i in range(self.steps):
            self.pace(turn * self.steps + i, turns * self.steps)
            some = shuffled[i * self.batch : (i + 1) * self.batch]
            self.update(seen[some], self.labels[some])

    def pace(self, now: int, total: int) -> None:
        """The learning rate of this update: up over the first fifth, down over the rest."""
        rise = max(total // 5, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * min(now / rise, (total - now) / max(total - rise, 1))

    def update(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._precision():
            return F.cross_entropy(self.model(x), y, label_smoothing=0.1)

    @torch.no_grad()
    def score(self) -> float:
        self.model.eval()
        right = 0
        for x, y in zip(self.test_images.split(2000), self.test_labels.split(2000), strict=True):
            with self._precision():
                right += int((self.model(x).argmax(1) == y).sum())
        return 100 * right / len(self.test_labels)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


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


if __name__ == "__main__":
    main()
