"""Pruning against low rank on real CIFAR-10: lottery tickets, Early-Bird tickets, Pufferfish; ResNet-18, one GPU.

    python benchmarks/tickets.py --data FOLDER [--seeds 0 1 2] [--epochs 30] [--arms dense 'early-bird*'] [--out FILE]
    python benchmarks/tickets.py --table FILE...

Recipe, data and seeds are those of `cifar10.py`. All arms train by a CUDA graph of forward and backward, captured anew
after a change of the model (--eager: none does). A result is written when its run is over; what is in --out already is not
trained again. Several processes may share the work by --arms or --seeds, each with its own --out, and with --shared: times
are worth something only where a process has the GPU for itself.

`pufferfish` is the paper's hybrid at ratio 0.25 after a third of the epochs, `auto` is `pf.Switch()` as it is.
`early-bird 50 %` removes that share of the channels, rounded to multiples of 8 in each group. `lottery ticket` prunes a
fifth of the weights a round, over the whole network, and rewinds to the end of the first epoch; its rounds are trained one
after the other, and every number of rounds in --rounds is a row.

Parameters and MACs (forward, one image) are the trained network's; a lottery ticket's are those that are not zero, though the
GPU computes with all. Epochs, training MACs and seconds are of the whole way there: all rounds, warm-up, the change itself;
scoring is left out. Training MACs are what is computed, zeros included. Differences are paired by seed, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import paired
import torch
from cifar10 import RESNET, Data, Training, load
from paired import Line
from pufferfish.lab.train.graphed_callable import GraphedCallable
from torch import Tensor

import pufferfish as pf
from pufferfish.lab.rivals.nonzero_macs import nonzero_macs
from pufferfish.lab.rivals.pruning_by_name import LotteryTicketChange, PruningChange, build_pruning_change
from pufferfish.planning.profile import profile
from pufferfish.planning.table import format_table

T = TypeVar("T")
NAME = "tickets"
ARMS = (
    "dense", "pufferfish", "auto", "early-bird 30 %", "early-bird 50 %", "early-bird 70 %", "lottery ticket",
)  # fmt: skip


def main() -> None:
    ask = paired.options(__doc__)
    ask.add_argument("--epochs", type=int, default=30)
    ask.add_argument("--batch", type=int, default=512)
    ask.add_argument("--rounds", type=int, nargs="+", default=[5, 9], help="of the lottery: the rows to show")
    ask.add_argument("--limit", type=int, help="use only so many images of each batch file, to try it out")
    ask.add_argument("--shared", action="store_true", help="other processes use the GPU too: record no times")
    ask.add_argument("--eager", action="store_true", help="no CUDA graph")
    given = ask.parse_args()
    if given.table:
        print(table(paired.read(given.table, NAME)))
    elif given.data is None:
        raise SystemExit("--data is needed")
    elif min(given.rounds) < 1 or given.epochs < 2:
        raise SystemExit("--rounds are 1 or more, --epochs 2 or more")
    else:
        train(given)


def train(given: argparse.Namespace) -> None:
    """All that was asked for and is not in --out yet, one after the other; then the table."""
    wanted = paired.chosen(given.arms, list(ARMS))
    cuda = torch.cuda.is_available()
    graph = cuda and not given.eager
    settings = paired.about(
        NAME,
        epochs=given.epochs,
        batch=given.batch,
        rounds=sorted(given.rounds),
        limit=given.limit,
        graph=graph,
    )
    lines = paired.earlier(given.out, settings)
    done = {(line["of"], line["seed"]) for line in lines}
    data = load(given.data, torch.device("cuda" if cuda else "cpu"), given.limit)
    if len(data[0]) < given.batch:
        raise SystemExit(f"--batch {given.batch}: there are only {len(data[0])} images to train on")
    for seed in given.seeds:
        for name in [arm for arm in wanted if (arm, seed) not in done]:
            run = Ticketed(data, seed, given.batch, graph)
            found = [
                {"of": name, "seed": seed, **line, "settings": settings}
                for line in results(name, run, given.epochs, set(given.rounds))
            ]
            if given.shared:
                found = [line | {"seconds": None} for line in found]
            lines += found
            paired.append(given.out, found)
            for line in found:
                spent = "" if given.shared else f"{line['seconds']:7.1f} s"
                print(
                    f"seed {seed}  {line['arm']:28} {line['score']:6.2f} {line['parameters']:12,} parameters "
                    + spent,
                    flush=True,
                )
    print("\n" + table(lines))


class Ticketed(Training):
    """One run, which counts what it spends."""

    rival: PruningChange | None = None

    def __init__(self, data: Data, seed: int, batch: int, graph: bool) -> None:
        super().__init__(data, seed, batch, data[0].device)
        self.graphed = graph
        self.image = torch.zeros(1, *self.images.shape[1:], device="meta")
        self.epochs, self.seconds, self.training_macs = 0, 0.0, 0
        self.changed()

    def changed(self) -> None:
        """The model is another one now: what was captured is for the old."""
        self._run: Any = GraphedCallable(self._gradients) if self.graphed else self._gradients
        found = profile(self.model, self.image)
        self.macs, self._a_row = found.forward_macs, found.forward_macs + found.backward_macs

    def advance(self, turn: int, turns: int) -> None:
        super().advance(turn, turns)
        self.epochs += 1
        self.training_macs += self.steps * self.batch * self._a_row

    def update(self, x: Tensor, y: Tensor) -> None:
        self._run([x, y], [])
        self.optimizer.step()
        if self.rival is not None:
            self.rival.after_step()

    def timed(self, work: Callable[[], T]) -> T:
        """What it returns; its time counts."""
        begun = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begun
        return result

    def _gradients(self, inputs: list[Tensor], kept: list[Tensor]) -> Tensor:
        """New ones, not added to old ones: so a replay fills the same tensors again."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*inputs)
        loss.backward()
        return loss.detach()


def results(name: str, run: Ticketed, epochs: int, rounds: set[int]) -> Iterator[Line]:
    """Train an arm; a line at its end, or at the end of each round that was asked for."""
    switch: pf.Switch | None = None
    if name == "pufferfish":
        switch = pf.Switch(rank=0.25, keep=RESNET.keep, when=pf.AtEpoch(epochs // 3))
    elif name == "auto":
        switch = pf.Switch()
    elif name != "dense":
        share = int(name.split()[1]) / 100 if name.startswith("early-bird") else 0
        word = f"early-bird-{share}" if share else f"lottery-ticket-{max(rounds)}"
        run.rival = build_pruning_change(
            word, run.model, run.optimizer, epochs=epochs, steps_per_epoch=run.steps
        )
    rival, changed_at = run.rival, None

    def change(epoch: int) -> bool:
        if switch is not None:
            return switch.step(run.model, run.optimizer, epoch=epoch, total=epochs)
        return rival is not None and rival.begin_epoch(epoch)

    def line(row: str) -> Line:
        lottery = rival.pruner if isinstance(rival, LotteryTicketChange) else None
        dense = sum(p.numel() for p in run.model.parameters())
        return {
            "arm": row, "score": run.score(), "changed": changed_at,
            "parameters": rival.parameters if rival else dense,
            "macs": nonzero_macs(run.model, run.image) if lottery else run.macs,
            "epochs": run.epochs, "seconds": run.seconds, "training_macs": run.training_macs,
        }  # fmt: skip

    for epoch in range(rival.epochs if rival else epochs):
        if run.timed(lambda epoch=epoch: change(epoch)):
            changed_at = epoch
            run.changed()
        turn = rival.schedule_position(epoch * run.steps)[0] // run.steps if rival else epoch
        run.timed(lambda turn=turn: run.advance(turn, epochs))
        if isinstance(rival, LotteryTicketChange) and rival.pruner.round in rounds and turn == epochs - 1:
            yield line(f"{name}, {rival.pruner.round} rounds")
    if not isinstance(rival, LotteryTicketChange):
        yield line(name)


def table(lines: list[Line]) -> str:
    """Means, and accuracy and time beside the dense run's."""
    of = paired.by_arm(lines)
    dense = of.get("dense", {})
    rows = [[
        "", "parameters", "MACs", "accuracy, %", "difference to dense", "changed at", "epochs", "training MACs",
        "seconds", "time of dense", "seeds",
    ]]  # fmt: skip
    for arm in sorted(of, key=lambda name: next(i for i, known in enumerate(ARMS) if name.startswith(known))):
        found = of[arm]
        mean = {
            key: statistics.mean(one[key] for one in found.values())
            for key in ("parameters", "macs", "score", "epochs", "training_macs")
        }
        gaps = paired.paired_differences(paired.scored(found), paired.scored(dense)) if arm != "dense" else []
        at = sorted({one["changed"] for one in found.values()} - {None})
        times = {seed: one["seconds"] for seed, one in found.items() if one["seconds"] is not None}
        slower = [t / dense[s]["seconds"] for s, t in times.items() if s in dense and dense[s]["seconds"]]
        rows.append([
            arm, f"{mean['parameters']:,.0f}", f"{mean['macs'] / 1e6:.0f} M", f"{mean['score']:.2f}",
            paired.interval(gaps, 2),
            "–".join(map(str, at[:1] + at[1:][-1:])) if "lottery" not in arm else "", f"{mean['epochs']:.0f}",
            f"{mean['training_macs']:.2e}", f"{statistics.mean(times.values()):.1f}" if times else "",
            f"{statistics.mean(slower):.2f}×" if slower else "", str(len(found)),
        ])  # fmt: skip
    return format_table(rows, left=(0,))


if __name__ == "__main__":
    main()
