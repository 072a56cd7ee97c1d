"""What benchmarks share whose arms each choose a rate before they are compared: the same few for all, on held-out images.

Where the best of these is at the edge, more may be tried beyond for one arm; that is taken if it gains more than half a
point. The final runs train on all images and are scored on the test set after the last epoch. A result is written as soon
as it is there; what is in --out already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import paired
import torch
from cifar10 import Data, load
from paired import Line

from pufferfish.planning.table import format_table

GAIN = 0.5  # percentage points that a rate beyond the common ones must bring


def options(text: str | None, rates: list[float], what: str) -> argparse.ArgumentParser:
    ask = paired.options(text)
    ask.add_argument(
        "--choose", type=Path, nargs="+", help="no training: the best rate of each arm, to --out"
    )
    group = ask.add_mutually_exclusive_group()
    group.add_argument("--rates", type=float, nargs="+", default=rates, help=what)
    group.add_argument("--rates-from", type=Path, help="a file made by --choose")
    ask.add_argument("--held-out", type=int, default=0, help="score on so many training images instead")
    ask.add_argument("--epochs", type=int, default=30)
    ask.add_argument("--limit", type=int, help="use only so many images of each batch file, to try it out")
    return ask


def main(
    name: str,
    key: str,
    given: argparse.Namespace,
    train: Callable[[], None],
    table: Callable[[list[Line]], str],
) -> None:
    """Do what was asked for; `key` is what a result calls the rate that was tried."""
    if given.choose:
        choose(paired.read(given.choose, name), key, given.out)
    elif given.table:
        print(table(paired.read(given.table, name)))
    elif given.data is None:
        raise SystemExit("--data is needed")
    else:
        train()


def data(given: argparse.Namespace, device: torch.device, batch: int) -> Data:
    """The images, and those that are scored; enough for a batch."""
    found = held_out(load(given.data, device, given.limit), given.held_out)
    if len(found[0]) < batch:
        raise SystemExit(f"a batch of {batch}: there are only {len(found[0])} images to train on")
    return found


def due(
    given: argparse.Namespace, key: str, names: list[str], done: list[Line]
) -> list[tuple[str, float, int]]:
    """(arm, rate, seed) of all that is to be trained."""
    there = {(line["arm"], line[key], line["seed"]) for line in done}
    chosen = json.loads(given.rates_from.read_text()) if given.rates_from else {}
    if given.rates_from and (missing := set(names) - chosen.keys()):
        raise SystemExit(f"{given.rates_from} has no rate for " + ", ".join(sorted(missing)))
    return [
        one
        for seed in given.seeds
        for name in names
        for rate in ([chosen[name]] if given.rates_from else given.rates)
        if (one := (name, rate, seed)) not in there
    ]


def held_out(data: Data, n: int) -> Data:
    """The last `n` training images in place of the test set."""
    if n == 0:
        return data
    images, labels = data[:2]
    if not 0 < n < len(images):
        raise SystemExit(f"--held-out {n}: there are {len(images)} training images")
    return images[:-n], labels[:-n], images[-n:], labels[-n:]


def choose(lines: list[Line], key: str, out: Path | None) -> None:
    """Print what each rate gave, and the best one of each arm."""
    if not lines[0]["settings"]["held_out"]:
        raise SystemExit("these were scored on the test set; learning rates are chosen with --held-out")
    scores: dict[str, dict[float, dict[int, float]]] = {}
    for line in lines:
        scores.setdefault(line["arm"], {}).setdefault(line[key], {})[line["seed"]] = line["score"]
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
            if means[lr] > means[best[arm]] + GAIN:
                best[arm] = lr
        row = [f"{means[lr]:.2f}" if lr in means else "" for lr in rates]
        last = len(means) > 1 and best[arm] in (min(means), max(means))
        rows.append([arm, *row, f"{best[arm]:g}", "at the edge" if last else ""])
    print(format_table(rows, left=(0, len(rows[0]) - 1)))
    text = json.dumps(best, indent=1)
    if out:
        out.write_text(text + "\n")
    else:
        print("\n" + text)
