"""Large batches on real CIFAR-10: ResNet-18 by SGD with linear scaling and warm-up, LARS, LAMB and SAM.

    python benchmarks/large_batch.py --data FOLDER --held-out 5000 --seeds 0 --out tried.jsonl
    python benchmarks/large_batch.py --choose tried.jsonl... --out chosen.json
    python benchmarks/large_batch.py --data FOLDER --factors-from chosen.json --out results.jsonl [--arms '* 8192' …]
    python benchmarks/large_batch.py --table results.jsonl...

Data, model, augmentation, precision and label smoothing are those of `cifar10.py`, and so is the number of epochs: a
larger batch makes fewer updates, with an epoch's last images left out. `sgd 512` is its recipe, to compare with.

Every arm tries the same factors (--factors) on its usual peak of the rate. For SGD and SAM that is 0.1 for 128 images,
scaled linearly. LARS and LAMB grow with the root of the batch, as LAMB's authors do it: 1.6 (trust 0.01, so that weights move by
1.6 % of their norm, and vectors, which have no trust ratio, at SGD's rate) and 0.02 at 2048. All rates rise linearly over
the first fifth, from what the scaling takes for a batch of 128, and go linearly to 0. The factor is chosen on the last training images
(--held-out), which are then not trained on. The final runs train on all images and are scored on the test set after the
last epoch. A result is written as soon as it is there; what is in --out already is not trained again. Several processes
may share the work by --arms or --seeds, each with its own --out.

No CUDA graph: at such batches kernels run for longer than it takes to launch them. SAM has two passes an update, and is
given as many updates. Differences are paired by seed, with 95 % intervals that are not corrected for the number of
comparisons.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import compressed
import paired
import torch
import torch.nn.functional as F
from cifar10 import Data, Training, augmented, load
from paired import Line
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR

import pufferfish as pf
from pufferfish.lab.rivals import LAMB, LARS, SAM, linear_scaling
from pufferfish.table import aligned

NAME = "large_batch"
BASE = 128  # the batch that the warm-up begins with


@dataclass(frozen=True)
class Rival:
    """An optimizer, and its usual peak of the rate for a batch."""

    make: Callable[[nn.Module, float], Optimizer]
    usual: Callable[[int], float]


def sgd(model: nn.Module, lr: float) -> Optimizer:
    weights, vectors = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return SGD(groups, lr, momentum=0.9, nesterov=True, weight_decay=5e-4)


def lars(model: nn.Module, lr: float) -> Optimizer:
    return LARS(model.parameters(), lr, weight_decay=5e-4, nesterov=True, trust=0.01)


def lamb(model: nn.Module, lr: float) -> Optimizer:
    return LAMB(model.parameters(), lr, weight_decay=0.1)


def sam(model: nn.Module, lr: float) -> Optimizer:
    return SAM(sgd(model, lr), model, rho=0.05)


RIVALS = {
    "sgd": Rival(sgd, lambda batch: 0.1 * batch / BASE),
    "lars": Rival(lars, lambda batch: 1.6 * (batch / 2048) ** 0.5),
    "lamb": Rival(lamb, lambda batch: 0.02 * (batch / 2048) ** 0.5),
    "sam": Rival(sam, lambda batch: 0.1 * batch / BASE),
}


def arms(batches: list[int]) -> dict[str, tuple[str, int]]:
    """Name → (rival, batch)."""
    return {"sgd 512": ("sgd", 512)} | {
        f"{name} {batch}": (name, batch) for batch in batches for name in RIVALS
    }


def main() -> None:
    ask = paired.options(__doc__)
    ask.add_argument("--choose", type=Path, nargs="+", help="no training: each arm's best factor, to --out")
    factors = ask.add_mutually_exclusive_group()
    factors.add_argument(
        "--factors", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="on the usual rate"
    )
    factors.add_argument("--factors-from", type=Path, help="a file made by --choose")
    ask.add_argument("--held-out", type=int, default=0, help="score on so many training images instead")
    ask.add_argument("--epochs", type=int, default=30)
    ask.add_argument("--batches", type=int, nargs="+", default=[2048, 8192])
    ask.add_argument("--limit", type=int, help="use only so many images of each batch file, to try it out")
    given = ask.parse_args()
    if given.choose:
        lines = paired.read(given.choose, NAME)
        compressed.choose([line | {"lr": line["factor"]} for line in lines], given.out)
    elif given.table:
        print(table(paired.read(given.table, NAME)))
    elif given.data is None:
        raise SystemExit("--data is needed")
    else:
        train(given)


def train(given: argparse.Namespace) -> None:
    """All that was asked for and is not in --out yet, one after the other."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    settings = {
        "benchmark": NAME,
        "epochs": given.epochs,
        "held_out": given.held_out,
        "limit": given.limit,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "pufferfish": pf.__version__,
    }
    done = set()
    if given.out and given.out.exists() and given.out.stat().st_size:
        lines = paired.read([given.out], NAME)
        if lines[0]["settings"] != settings:
            raise SystemExit(f"{given.out} has results with {lines[0]['settings']}, not {settings}")
        done = {(line["arm"], line["factor"], line["seed"]) for line in lines}
    known = arms(given.batches)
    wanted = [name for name in known if name in paired.chosen(given.arms, list(known))]
    chosen = json.loads(given.factors_from.read_text()) if given.factors_from else {}
    if given.factors_from and (missing := set(wanted) - chosen.keys()):
        raise SystemExit(f"{given.factors_from} has no factor for " + ", ".join(sorted(missing)))
    data = compressed.held_out(load(given.data, device, given.limit), given.held_out)
    if len(data[0]) < (largest := max(known[name][1] for name in wanted)):
        raise SystemExit(f"a batch of {largest}: there are only {len(data[0])} images to train on")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in settings.items()), "\n")
    for seed in given.seeds:
        for name in wanted:
            for factor in [chosen[name]] if given.factors_from else given.factors:
                if (name, factor, seed) in done:
                    continue
                run = LargeBatch(data, seed, *known[name], factor, given.epochs, device)
                seconds = sum(paired.timed(run, turn, given.epochs) for turn in range(given.epochs))
                found = {
                    "arm": name, "factor": factor, "lr": run.peak, "seed": seed, "score": run.score(),
                    "updates": run.steps * given.epochs, "seconds": seconds, "settings": settings,
                }  # fmt: skip
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                print(
                    f"seed {seed}  {name:10} rate {run.peak:<7.4g} {found['score']:6.2f} {seconds:6.1f} s",
                    flush=True,
                )


class LargeBatch(Training):
    """One run of one arm; a turn is an epoch."""

    def __init__(
        self, data: Data, seed: int, rival: str, batch: int, factor: float, epochs: int, device: torch.device
    ) -> None:
        super().__init__(data, seed, batch, device)
        self.steps = len(self.images) // batch
        self.peak = factor * RIVALS[rival].usual(batch)
        self.optimizer = RIVALS[rival].make(self.model, self.peak * BASE / batch)
        rise = max(epochs * self.steps // 5, 1)
        rest = max(epochs * self.steps - rise, 1)
        self.schedule = linear_scaling(
            self.optimizer, base_batch=BASE, batch=batch, warm_up=rise,
            after=lambda optimizer: LinearLR(optimizer, 1.0, 0.0, total_iters=rest),
        )  # fmt: skip

    def advance(self, turn: int, turns: int) -> None:
        self.model.train()
        shuffled = torch.randperm(len(self.images), generator=self.generator, device=self.device)
        seen = augmented(self.images, self.generator)
        for some in shuffled.split(self.batch)[: self.steps]:
            x, y = seen[some], self.labels[some]
            self._loss(x, y).backward()
            if isinstance(self.optimizer, SAM):
                with self.optimizer.perturbed():
                    self._loss(x, y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._precision():
            return F.cross_entropy(self.model(x), y, label_smoothing=0.1)


def table(lines: list[Line]) -> str:
    """Means, and differences to SGD with the same batch."""
    scores: dict[str, dict[int, float]] = {}
    of: dict[str, list[Line]] = {}
    for line in lines:
        if line["seed"] in scores.setdefault(line["arm"], {}):
            raise SystemExit(f"{line['arm']!r}, seed {line['seed']}: more than one result")
        scores[line["arm"]][line["seed"]] = line["score"]
        of.setdefault(line["arm"], []).append(line)
    measure = "held-out accuracy, %" if lines[0]["settings"]["held_out"] else "accuracy, %"
    rows = [["", "batch", "rate", "updates", measure, "difference to sgd", "seconds", "seeds"]]
    rivals = list(RIVALS)
    for arm in sorted(scores, key=lambda a: (int(a.split()[1]), rivals.index(a.split()[0]))):
        name, batch = arm.split()
        gaps = [] if name == "sgd" else paired.paired(scores[arm], scores.get(f"sgd {batch}", {}))
        rates = sorted({line["lr"] for line in of[arm]})
        rows.append([
            name, batch, ", ".join(f"{lr:.4g}" for lr in rates), str(of[arm][0]["updates"]),
            f"{statistics.mean(scores[arm].values()):.2f}", paired.interval(gaps, 2),
            f"{statistics.mean(line['seconds'] for line in of[arm]):.0f}", str(len(scores[arm])),
        ])  # fmt: skip
    return aligned(rows, left=(0,))


if __name__ == "__main__":
    main()
