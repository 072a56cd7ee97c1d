"""Accuracy of compressed training on real CIFAR-10: ResNet-18, four workers, every method with its best learning rate.

    python benchmarks/compressed.py --data FOLDER --held-out 5000 --epochs 10 --seeds 0 --out tried.jsonl
    python benchmarks/compressed.py --choose tried.jsonl... --out chosen.json
    python benchmarks/compressed.py --data FOLDER --rates-from chosen.json --out results.jsonl [--arms 'top-k*' …]
    python benchmarks/compressed.py --table results.jsonl...

Recipe, data and seeds are those of `cifar10.py`; its 512 images a step are 128 for each of four workers, which one
process simulates (`pufferfish.lab.train.simulated_ddp`, tested equal to real DDP workers). Batch normalisation is over 128 images
therefore, and `plain`, which sends all, is not quite the dense run of `cifar10.py`.

The peak of the learning rate is chosen for each arm from the same few (--rates), on the last training images
(--held-out), which are then not trained on; `rates.py` says how. Several processes may share the work by --arms or
--seeds, each with its own --out.

`dgc` has its momentum, 0.9 without Nesterov, in the method. The optimizer has none for what is compressed; 1-D tensors keep
theirs. Its weight decay stays outside that momentum and is 1/(1 − 0.9) times as large to weigh the same. Sparsity
rises as in the paper, in five stages over the first sixth of the run. Differences are paired by seed, with 95 % intervals that
are not corrected for the number of comparisons.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import paired
import rates
import torch
from cifar10 import Data, Training
from paired import Claim, Line
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.compression import Method, Settings
from pufferfish.lab.train.simulated_ddp import SimulatedDDP
from pufferfish.planning.table import format_table

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
        "plain": Arm(pf.compression.NoCompression()),
        "bf16": Arm(pf.compression.BFloat16()),
        "int8": Arm(pf.compression.BlockInt8()),
        "powersgd 4": Arm(pf.compression.PowerSGD(4)),
        "top-k 1 %": Arm(pf.compression.TopK(0.01)),
        "top-k 1 %, global": Arm(pf.compression.TopK(0.01), "global"),
        "dgc 0.1 %": Arm(pf.compression.DGC(0.999, momentum=0.9, warm_up=max(steps // 30, 1))),
        "dgc 0.1 %, global": Arm(
            pf.compression.DGC(0.999, momentum=0.9, warm_up=max(steps // 30, 1)), "global"
        ),
        "random-k 1 %, all-reduce": Arm(pf.compression.RandomK(0.01, "shared")),
        "random-k 1 %, all-gather": Arm(pf.compression.RandomK(0.01, "own")),
        "block-random-k 1 %, all-reduce": Arm(pf.compression.BlockRandomK(0.01, "shared")),
        "block-random-k 1 %, all-reduce, global": Arm(pf.compression.BlockRandomK(0.01, "shared"), "global"),
        "block-random-k 1 %, all-gather": Arm(pf.compression.BlockRandomK(0.01, "own")),
    }


def main() -> None:
    ask = rates.options(__doc__, [0.2, 0.4, 0.8], "peaks of the learning rate")
    ask.add_argument("--workers", type=int, default=4)
    ask.add_argument("--batch", type=int, default=512, help="of all workers together")
    ask.add_argument("--eager", action="store_true", help="no CUDA graph")
    given = ask.parse_args()
    if given.batch % given.workers:
        raise SystemExit(f"--batch {given.batch} does not go to {given.workers} workers in equal parts")
    rates.main(NAME, "lr", given, lambda: train(given), table)


def train(given: argparse.Namespace) -> None:
    """All that was asked for and is not in --out yet, one after the other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = paired.about(
        NAME, epochs=given.epochs, workers=given.workers, batch=given.batch, held_out=given.held_out,
        limit=given.limit,
    )  # fmt: skip
    done = paired.earlier(given.out, settings)
    data = rates.data(given, device, given.batch)
    known = arms(given.epochs * (len(data[0]) // given.batch))
    for name, lr, seed in rates.due(given, "lr", paired.chosen(given.arms, list(known)), done):
        found = Compressed(data, seed, known[name], lr, given, device).result(given.epochs)
        paired.append(given.out, [{"arm": name, "lr": lr, "seed": seed, **found, "settings": settings}])
        print(
            f"seed {seed}  lr {lr:<5g} {name:40} {found['score']:6.2f} {found['seconds']:6.1f} s  "
            f"{found['wire']:12,.0f} bytes a step",
            flush=True,
        )


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
            self.model,
            Settings(arm.method, scope=arm.scope, seed=seed),
            given.workers,
            optimizer=self.optimizer,
        )
        self.peak = lr
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

    def update(self, x: Tensor, y: Tensor) -> None:
        self.workers.average(self._gradients(x, y))
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
        return self.workers.gradients(self.loss, list(zip(self.x.chunk(n), self.y.chunk(n), strict=True)))


def optimizer(model: nn.Module, method: Method) -> torch.optim.SGD:
    """The recipe's, less the momentum that the method has itself."""
    weights: dict[str, object] = {"params": [p for p in model.parameters() if p.dim() > 1]}
    if isinstance(method, pf.compression.DGC):
        weights |= {"momentum": 0.0, "nesterov": False, "weight_decay": 5e-4 / (1 - method.momentum)}
    others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.SGD(
        [weights, others], lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4, foreach=True
    )


def table(lines: list[Line]) -> str:
    """Means, differences to plain, bytes, and what became of each claim."""
    of = paired.by_arm(lines)
    scores = {arm: paired.scored(found) for arm, found in of.items()}
    plain = scores.get("plain", {})

    def fewer(arm: str, key: str) -> str:
        if not plain:
            return ""
        full, sent = (statistics.mean(line[key] for line in of[name].values()) for name in ("plain", arm))
        return f"{full / sent:.1f}×"

    held = lines[0]["settings"]["held_out"]
    measure = "held-out accuracy, %" if held else "accuracy, %"
    rows = [["", "rate", measure, "difference to plain", "wire bytes, fewer", "at the end", "seeds"]]
    for arm in [name for name in arms(1) if name in scores]:
        used = sorted({line["lr"] for line in of[arm].values()})
        gaps = paired.paired_differences(scores[arm], plain) if arm != "plain" else []
        rows.append([
            arm, ", ".join(f"{lr:g}" for lr in used), f"{statistics.mean(scores[arm].values()):.2f}",
            paired.interval(gaps, 2), fewer(arm, "wire"), fewer(arm, "wire_last"), str(len(scores[arm])),
        ])  # fmt: skip
    text = format_table(rows, left=(0,))
    rows = []
    for arm in CLOSE:
        if gaps := paired.paired_differences(scores.get(arm, {}), plain):
            rows.append([f"{arm} within {POINTS} points of plain", paired.interval(gaps, 2), close(gaps)])
    for claim in ORDER:
        if gaps := paired.paired_differences(scores.get(claim.better, {}), scores.get(claim.worse, {})):
            rows.append([f"the paper: {claim.text}", paired.interval(gaps, 2), paired.verdict(gaps)])
    for words, one, other in ALIKE:
        if gaps := paired.paired_differences(scores.get(one, {}), scores.get(other, {})):
            rows.append([f"the paper: {words}", paired.interval(gaps, 2), alike(gaps)])
    if rows:
        text += "\n\n" + format_table([["claim", "difference", "verdict"], *rows], left=(0, 2))
    return text


def close(gaps: list[float]) -> str:
    """Whether the mean is within; and whether its interval is."""
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return "too few seeds"
    if mean < -POINTS:
        return "does not hold"
    return "holds" if mean - paired.half_width(gaps) >= -POINTS else "the mean does; not settled"


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
