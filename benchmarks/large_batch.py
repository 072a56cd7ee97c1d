"""Large batches on real CIFAR-10: ResNet-18 by SGD with linear scaling and warm-up, LARS, LAMB and SAM.

    python benchmarks/large_batch.py --data FOLDER --held-out 5000 --seeds 0 --out tried.jsonl
    python benchmarks/large_batch.py --choose tried.jsonl... --out chosen.json
    python benchmarks/large_batch.py --data FOLDER --rates-from chosen.json --out results.jsonl [--arms '* 8192' …]
    python benchmarks/large_batch.py --table results.jsonl...

Data, model, augmentation, precision and label smoothing are those of `cifar10.py`, and so is the number of epochs: a
larger batch makes fewer updates, with an epoch's last images left out. `sgd 512` is its recipe, to compare with.

Every arm tries the same factors (--rates) on its usual peak of the rate. For SGD and SAM that is 0.1 for 128 images,
scaled linearly. LARS and LAMB grow with the root of the batch, as LAMB's authors do it: 1.6 (trust 0.01, so that weights move by
1.6 % of their norm, and vectors, which have no trust ratio, at SGD's rate) and 0.02 at 2048. All rates rise linearly over
the first fifth, from what the scaling takes for a batch of 128, and go linearly to 0. The factor is chosen on the last training images
(--held-out), which are then not trained on; `rates.py` says how. Several processes may share the work by --arms or
--seeds, each with its own --out.

No CUDA graph: at such batches kernels run for longer than it takes to launch them. SAM has two passes an update, and is
given as many updates. Differences are paired by seed, with 95 % intervals that are not corrected for the number of
comparisons.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import paired
import rates
import torch
from cifar10 import Data, Training
from paired import Line
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR

from pufferfish.lab.rivals import LAMB, LARS, SAM, linear_scaling
from pufferfish.planning.table import format_table

NAME = "large_batch"
BASE = 128  # the batch that the warm-up begins with


@dataclass(frozen=True)
class Rival:
    """An optimizer, and its usual peak of the rate for a batch."""

    make: Callable[[nn.Module, float], Optimizer]
    usual: Callable[[int], float]


def sgd(model: nn.Module, lr: float, make: Callable[..., SGD] = SGD) -> SGD:
    weights, vectors = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return make(groups, lr, momentum=0.9, nesterov=True, weight_decay=5e-4)


def lars(model: nn.Module, lr: float) -> Optimizer:
    return LARS(model.parameters(), lr, weight_decay=5e-4, nesterov=True, trust=0.01)


def lamb(model: nn.Module, lr: float) -> Optimizer:
    return LAMB(model.parameters(), lr, weight_decay=0.1)


def sam(model: nn.Module, lr: float) -> Optimizer:
    return sgd(model, lr, partial(SAM, rho=0.05))


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
    ask = rates.options(__doc__, [0.5, 1.0, 2.0], "factors on the usual rate")
    ask.add_argument("--batches", type=int, nargs="+", default=[2048, 8192])
    given = ask.parse_args()
    rates.main(NAME, "factor", given, lambda: train(given), table)


def train(given: argparse.Namespace) -> None:
    """All that was asked for and is not in --out yet, one after the other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = paired.about(NAME, epochs=given.epochs, held_out=given.held_out, limit=given.limit)
    known = arms(given.batches)
    wanted = paired.chosen(given.arms, list(known))
    due = rates.due(given, "factor", wanted, paired.earlier(given.out, settings))
    data = rates.data(given, device, max(known[name][1] for name in wanted))
    for name, factor, seed in due:
        run = LargeBatch(data, seed, *known[name], factor, given.epochs, device)
        seconds = sum(paired.timed(run, turn, given.epochs) for turn in range(given.epochs))
        found = {
            "arm": name, "factor": factor, "lr": run.peak, "seed": seed, "score": run.score(),
            "updates": run.steps * given.epochs, "seconds": seconds, "settings": settings,
        }  # fmt: skip
        paired.append(given.out, [found])
        print(
            f"seed {seed}  {name:10} rate {run.peak:<7.4g} {found['score']:6.2f} {seconds:6.1f} s", flush=True
        )


class LargeBatch(Training):
    """One run of one arm; a turn is an epoch."""

    def __init__(
        self, data: Data, seed: int, rival: str, batch: int, factor: float, epochs: int, device: torch.device
    ) -> None:
        super().__init__(data, seed, batch, device)
        self.peak = factor * RIVALS[rival].usual(batch)
        self.optimizer = RIVALS[rival].make(self.model, self.peak * BASE / batch)
        rise = max(epochs * self.steps // 5, 1)
        rest = max(epochs * self.steps - rise, 1)
        self.schedule = linear_scaling(
            self.optimizer, base_batch=BASE, batch=batch, warm_up=rise,
            after=lambda optimizer: LinearLR(optimizer, 1.0, 0.0, total_iters=rest),
        )  # fmt: skip

    def pace(self, now: int, total: int) -> None:
        if now:
            self.schedule.step()

    def update(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        if isinstance(self.optimizer, SAM):
            with self.optimizer.perturbed(self.model):
                self.loss(x, y).backward()
        self.optimizer.step()


def table(lines: list[Line]) -> str:
    """Means, and differences to SGD with the same batch."""
    of = paired.by_arm(lines)
    scores = {arm: paired.scored(found) for arm, found in of.items()}
    measure = "held-out accuracy, %" if lines[0]["settings"]["held_out"] else "accuracy, %"
    rows = [["", "batch", "rate", "updates", measure, "difference to sgd", "seeds"]]
    rivals = list(RIVALS)
    for arm in sorted(scores, key=lambda a: (int(a.split()[1]), rivals.index(a.split()[0]))):
        name, batch = arm.split()
        gaps = [] if name == "sgd" else paired.paired_differences(scores[arm], scores.get(f"sgd {batch}", {}))
        used = sorted({line["lr"] for line in of[arm].values()})
        rows.append([
            name, batch, ", ".join(f"{lr:.4g}" for lr in used), str(next(iter(of[arm].values()))["updates"]),
            f"{statistics.mean(scores[arm].values()):.2f}", paired.interval(gaps, 2),
            str(len(scores[arm])),
        ])  # fmt: skip
    return format_table(rows, left=(0,))


if __name__ == "__main__":
    main()
