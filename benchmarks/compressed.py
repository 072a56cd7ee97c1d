"""Accuracy of compressed training on real CIFAR-10: ResNet-18, four workers, every method with its best learning rate.

    python benchmarks/compressed.py --data FOLDER --held-out 5000 --epochs 10 --seeds 0 --out tried.jsonl
    python benchmarks/compressed.py --choose tried.jsonl... --out chosen.json
    python benchmarks/compressed.py --data FOLDER --lr-from chosen.json --out results.jsonl [--arms 'top-k*' …]
    python benchmarks/compressed.py --table results.jsonl...

Recipe, data and seeds are those of `cifar10.py`; its 512 images a step are 128 for each of four workers, which one
process simulates (`pufferfish.lab.simulated`, tested equal to real DDP workers). Batch normalisation is over 128 images
therefore, and `plain`, which sends all, is not quite the dense run of `cifar10.py`.

The peak of the learning rate is chosen for each arm from the same few (--lrs), on the last training images (--held-out),
which are then not trained on. Where the best is at the edge, more may be tried beyond; it is taken if it gains more than
half a point. The final runs train on all images and are scored on the test set after the last epoch.
A result is written as soon as it is there; what is in --out already is not trained again. Several processes may share
the work by --arms or --seeds, each with its own --out.

`dgc` has its momentum, 0.9 without Nesterov, in the method. The optimizer has none for what is compressed; 1-D tensors keep
theirs. Its weight decay stays outside that momentum and is 1/(1 − 0.9) times as large to weigh the same. Sparsity
rises as in the paper, in five stages over the first sixth of the run. Differences are paired by seed, with 95 % intervals that
are not corrected for the number of comparisons.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paired
import torch
import torch.nn.functional as F
from cifar10 import Data, Training, augmented, load
from paired import Claim, Line
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.compress import Method
from pufferfish.lab.simulated import SimulatedDDP
from pufferfish.table import aligned

NAME = "compressed"
POINTS = 0.5  # what counts as close, in percentage points
CLOSE = (  # to plain, it is claimed
    "powersgd 4", "int8", "top-k 1 %", "top-k 1 %, global", "dgc 0.1 %", "dgc 0.1 %, global",
)  # fmt: skip
#: Seed paper "Sparse Communication for Training Deep Networks", section 4.2.1.
ORDER = (
    Claim("plain SGD over top-k", "plain", "top-k 1 %"),
    Claim("top-k over random-k, all-gather", "top-k 1 %", "random-k 1 %, all-gather"),
    Claim("top-k over random-k, all-reduce", "top-k 1 %", "random-k 1 %, all-reduce"),
    Claim("top-k over block-random-k, all-gather", "top-k 1 %", "block-random-k 1 %, all-gather"),
    Claim("top-k over block-random-k, all-reduce", "top-k 1 %", "block-random-k 1 %, all-reduce"),
    Claim(
        "block-random-k: all-gather over all-reduce",
        "block-random-k 1 %, all-gather",
        "block-random-k 1 %, all-reduce",
    ),
    Claim("top-k: layer over global", "top-k 1 %", "top-k 1 %, global"),
    Claim(
        "block-random-k, all-reduce: layer over global",
        "block-random-k 1 %, all-reduce",
        "block-random-k 1 %, all-reduce, global",
    ),
)
ALIKE = (
    ("random-k: all-gather like all-reduce", "random-k 1 %, all-gather", "random-k 1 %, all-reduce"),
    (
        "all-gather: random-k like block-random-k",
        "random-k 1 %, all-gather",
        "block-random-k 1 %, all-gather",
    ),
)


@dataclass(frozen=True)
class Arm:
    method: Method
    scope: Literal["layer", "global"] = "layer"


def arms(steps: int) -> dict[str, Arm]:
    """Of a run of so many steps."""
    return {
        "plain": Arm(pf.NoCompression()),
        "bf16": Arm(pf.BFloat16()),
        "int8": Arm(pf.BlockInt8()),
        "powersgd 4": Arm(pf.PowerSGD(4)),
        "top-k 1 %": Arm(pf.TopK(0.01)),
        "top-k 1 %, global": Arm(pf.TopK(0.01), "global"),
        "dgc 0.1 %": Arm(pf.DGC(0.999, momentum=0.9, warm_up=max(steps // 30, 1))),
        "dgc 0.1 %, global": Arm(pf.DGC(0.999, momentum=0.9, warm_up=max(steps // 30, 1)), "global"),
        "random-k 1 %, all-reduce": Arm(pf.RandomK(0.01, "shared")),
        "random-k 1 %, all-gather": Arm(pf.RandomK(0.01, "own")),
        "block-random-k 1 %, all-reduce": Arm(pf.BlockRandomK(0.01, "shared")),
        "block-random-k 1 %, all-reduce, global": Arm(pf.BlockRandomK(0.01, "shared"), "global"),
        "block-random-k 1 %, all-gather": Arm(pf.BlockRandomK(0.01, "own")),
    }


def main() -> None:
    ask = paired.options(__doc__)
    ask.add_argument(
        "--choose", type=Path, nargs="+", help="no training: the best rate of each arm, to --out"
    )
    rates = ask.add_mutually_exclusive_group()
    rates.add_argument("--lrs", type=float, nargs="+", default=[0.2, 0.4, 0.8], help="peaks of the rate")
    rates.add_argument("--lr-from", type=Path, help="a file made by --choose")
    ask.add_argument("--held-out", type=int, default=0, help="score on so many training images instead")
    ask.add_argument("--epochs", type=int, default=30)
    ask.add_argument("--workers", type=int, default=4)
    ask.add_argument("--batch", type=int, default=512, help="of all workers together")
    ask.add_argument("--limit", type=int, help="use only so many images of each batch file, to try it out")
    ask.add_argument("--eager", action="store_true", help="no CUDA graph")
    given = ask.parse_args()
    if given.choose:
        choose(paired.read(given.choose, NAME), given.out)
    elif given.table:
        print(table(paired.read(given.table, NAME)))
    elif given.data is None:
        raise SystemExit("--data is needed")
    elif given.batch % given.workers:
        raise SystemExit(f"--batch {given.batch} does not go to {given.workers} workers in equal parts")
    else:
        train(given)


def train(given: argparse.Namespace) -> None:
    """All that was asked for and is not in --out yet, one after the other."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    settings = {
        "benchmark": NAME,
        "epochs": given.epochs,
        "workers": given.workers,
        "batch": given.batch,
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
        done = {(line["arm"], line["lr"], line["seed"]) for line in lines}
    data = held_out(load(given.data, device, given.limit), given.held_out)
    if len(data[0]) < given.batch:
        raise SystemExit(f"--batch {given.batch}: there are only {len(data[0])} images to train on")
    known = arms(given.epochs * (len(data[0]) // given.batch))
    wanted = paired.chosen(given.arms, list(known))
    rates = json.loads(given.lr_from.read_text()) if given.lr_from else {}
    if given.lr_from and (missing := wanted - rates.keys()):
        raise SystemExit(f"{given.lr_from} has no rate for " + ", ".join(sorted(missing)))
    todo = [
        (name, lr, seed)
        for seed in given.seeds
        for name in known
        if name in wanted
        for lr in ([rates[name]] if given.lr_from else given.lrs)
    ]
    print(f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in settings.items()), "\n")
    for name, lr, seed in todo:
        if (name, lr, seed) in done:
            continue
        run = Compressed(data, seed, known[name], lr, given, device)
        found = run.result(given.epochs)
        if given.out:
            with given.out.open("a") as file:
                line = {"arm": name, "lr": lr, "seed": seed, **found, "settings": settings}
                file.write(json.dumps(line) + "\n")
        print(
            f"seed {seed}  lr {lr:<5g} {name:40} {found['score']:6.2f} {found['seconds']:6.1f} s  "
            f"{found['wire']:12,.0f} bytes a step",
            flush=True,
        )


def held_out(data: Data, n: int) -> Data:
    """The last `n` training images in place of the test set."""
    if n == 0:
        return data
    images, labels = data[:2]
    if not 0 < n < len(images):
        raise SystemExit(f"--held-out {n}: there are {len(images)} training images")
    return images[:-n], labels[:-n], images[-n:], labels[-n:]


class Compressed(Training):
    """One run of one arm."""

    def __init__(
        self,
        data: Data,
        seed: int,
        arm: Arm,
        lr: float,
        given: argparse.Namespace,
        device: torch.device,
    ) -> None:
        super().__init__(data, seed, given.batch, device)
        self.optimizer = optimizer(self.model, arm.method)
        self.workers = SimulatedDDP(
            self.model, arm.method, given.workers, optimizer=self.optimizer, scope=arm.scope, seed=seed
        )
        self.lr = lr
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graphed = device.type == "cuda" and not given.eager

    def result(self, epochs: int) -> Line:
        """Train to the end: the score, the time, and what a worker sends in a step, on average and at the end."""
        begun = time.perf_counter()
        meter, sent = self.workers.meter, 0.0
        for epoch in range(epochs):
            sent = meter.wire_bytes
            self.advance(epoch, epochs)
        last = (meter.wire_bytes - sent) * epochs / meter.steps
        score = self.score()
        return {
            "score": score,
            "seconds": time.perf_counter() - begun,
            "wire": meter.wire_bytes / meter.steps,
            "wire_last": last,
        }

    def advance(self, turn: int, turns: int) -> None:
        steps = len(self.images) // self.batch
        total, rise = turns * steps, max(turns * steps // 5, 1)
        self.model.train()
        shuffled = torch.randperm(len(self.images), generator=self.generator, device=self.device)
        seen = augmented(self.images, self.generator)
        for i in range(steps):
            now = turn * steps + i
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(now / rise, (total - now) / max(total - rise, 1))
            some = shuffled[i * self.batch : (i + 1) * self.batch]
            self.workers.average(self._gradients(seen[some], self.labels[some]))
            self.optimizer.step()

    def _gradients(self, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
        """Each worker's. On a GPU all their passes are one graph: such small batches wait for launches otherwise."""
        if not self.graphed:
            self.x, self.y = x, y
            return self._passes()
        if self.graph is None:
            self._capture(x, y)
        assert self.graph is not None
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.found

    def _capture(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        before = [b.clone() for b in self.model.buffers()]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # libraries make themselves ready
                self._passes()
        torch.cuda.current_stream().wait_stream(aside)
        for b, old in zip(self.model.buffers(), before, strict=True):
            b.copy_(old)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = self._passes()

    def _passes(self) -> list[dict[str, Tensor]]:
        n = self.workers.size
        return self.workers.gradients(self._loss, list(zip(self.x.chunk(n), self.y.chunk(n), strict=True)))

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._precision():
            return F.cross_entropy(self.model(x), y, label_smoothing=0.1)


def optimizer(model: nn.Module, method: Method) -> torch.optim.SGD:
    """The recipe's, less the momentum that the method has itself."""
    weights: dict[str, object] = {"params": [p for p in model.parameters() if p.dim() > 1]}
    if isinstance(method, pf.DGC):
        weights |= {"momentum": 0.0, "nesterov": False, "weight_decay": 5e-4 / (1 - method.momentum)}
    others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.SGD(
        [weights, others], lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4, foreach=True
    )


def choose(lines: list[Line], out: Path | None) -> None:
    """Print what each rate gave, and the best one of each arm."""
    if not lines[0]["settings"]["held_out"]:
        raise SystemExit("these were scored on the test set; learning rates are chosen with --held-out")
    scores: dict[str, dict[float, dict[int, float]]] = {}
    for line in lines:
        scores.setdefault(line["arm"], {}).setdefault(line["lr"], {})[line["seed"]] = line["score"]
    rates = sorted({lr for tried in scores.values() for lr in tried})
    common = [lr for lr in rates if all(lr in tried for tried in scores.values())]
    if not common:
        raise SystemExit("no rate was tried for all arms")
    rows = [["held-out accuracy, %", *[f"{lr:g}" for lr in rates], "best", ""]]
    best = {}
    for arm, tried in scores.items():
        if len({frozenset(seeds) for seeds in tried.values()}) != 1:
            raise SystemExit(f"{arm!r} was not tried with the same seeds for each of {sorted(tried)}")
        means = {lr: statistics.mean(seeds.values()) for lr, seeds in sorted(tried.items())}
        best[arm] = max(common, key=means.__getitem__)
        above = [lr for lr in means if lr > common[-1]] if best[arm] == common[-1] else []
        below = [lr for lr in reversed(means) if lr < common[0]] if best[arm] == common[0] else []
        for lr in above + below:
            if means[lr] > means[best[arm]] + POINTS:
                best[arm] = lr
        row = [f"{means[lr]:.2f}" if lr in means else "" for lr in rates]
        last = len(means) > 1 and best[arm] in (min(means), max(means))
        rows.append([arm, *row, f"{best[arm]:g}", "at the edge" if last else ""])
    print(aligned(rows, left=(0, len(rows[0]) - 1)))
    text = json.dumps(best, indent=1)
    if out:
        out.write_text(text + "\n")
    else:
        print("\n" + text)


def table(lines: list[Line]) -> str:
    """Means, differences to plain, bytes, and what became of each claim."""
    scores: dict[str, dict[int, float]] = {}
    of: dict[str, list[Line]] = {}
    for line in lines:
        if line["seed"] in scores.setdefault(line["arm"], {}):
            raise SystemExit(f"{line['arm']!r}, seed {line['seed']}: more than one result")
        scores[line["arm"]][line["seed"]] = line["score"]
        of.setdefault(line["arm"], []).append(line)
    plain = scores.get("plain", {})

    def fewer(arm: str, key: str) -> str:
        if not plain:
            return ""
        full, sent = (statistics.mean(line[key] for line in of[name]) for name in ("plain", arm))
        return f"{full / sent:.1f}×"

    held = lines[0]["settings"]["held_out"]
    measure = "held-out accuracy, %" if held else "accuracy, %"
    rows = [["", "rate", measure, "difference to plain", "wire bytes, fewer", "at the end", "seeds"]]
    for arm in [name for name in arms(1) if name in scores]:
        rates = sorted({line["lr"] for line in of[arm]})
        gaps = paired.paired(scores[arm], plain) if arm != "plain" else []
        rows.append([
            arm, ", ".join(f"{lr:g}" for lr in rates), f"{statistics.mean(scores[arm].values()):.2f}",
            paired.interval(gaps, 2), fewer(arm, "wire"), fewer(arm, "wire_last"), str(len(scores[arm])),
        ])  # fmt: skip
    text = aligned(rows, left=(0,))
    rows = []
    for arm in CLOSE:
        if gaps := paired.paired(scores.get(arm, {}), plain):
            rows.append([f"{arm} within {POINTS} points of plain", paired.interval(gaps, 2), close(gaps)])
    for claim in ORDER:
        if gaps := paired.paired(scores.get(claim.better, {}), scores.get(claim.worse, {})):
            rows.append([f"the paper: {claim.text}", paired.interval(gaps, 2), paired.verdict(gaps)])
    for words, one, other in ALIKE:
        if gaps := paired.paired(scores.get(one, {}), scores.get(other, {})):
            rows.append([f"the paper: {words}", paired.interval(gaps, 2), alike(gaps)])
    if rows:
        text += "\n\n" + aligned([["claim", "difference", "verdict"], *rows], left=(0, 2))
    return text


def close(gaps: list[float]) -> str:
    """Whether the mean is within; and whether its interval is."""
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return "too few seeds"
    if mean < -POINTS:
        return "does not hold"
    return "holds" if mean - paired.half_width(gaps) >= -POINTS else f"holds, interval below −{POINTS}"


def alike(gaps: list[float]) -> str:
    """Whether a difference is surely smaller than what counts as close, or surely larger."""
    if len(gaps) < 2:
        return "too few seeds"
    mean, half = abs(statistics.mean(gaps)), paired.half_width(gaps)
    if mean + half <= POINTS:
        return f"confirmed: within {POINTS}"
    return "the opposite holds" if mean - half > POINTS else f"not settled: the interval contains ±{POINTS}"


if __name__ == "__main__":
    main()
