"""What the quality benchmarks share: arms that branch off one dense run, result files, the paired table.

Up to its switch an arm *is* the dense run: same code, same initialisation, same batches. So one dense run is
trained, and where the switch of an arm is due, a copy of model, optimizer and random generators goes off to the
end. A copy's switch is the real `pf.Switch.step` on the copied model and optimizer.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import math
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pufferfish as pf
from pufferfish.lab.report.seed_statistics import paired_differences, t_quantile
from pufferfish.planning.table import format_table

Line = dict[str, Any]


class Run(ABC):
    """A training run that goes on turn by turn: an epoch, or so many updates."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # of the batches

    @abstractmethod
    def advance(self, turn: int, turns: int) -> None: ...

    @abstractmethod
    def score(self) -> float: ...

    def copy(self) -> Run:
        """An independent run at the same point; data is shared."""
        other = copy.copy(self)
        other.model, other.optimizer = copy.deepcopy((self.model, self.optimizer))
        other.generator = torch.Generator(self.generator.device)
        other.generator.set_state(self.generator.get_state())
        return other


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one arm does differently from the dense run."""

    switch: Callable[[], pf.Switch]
    decay: float | None = None  # λ of Frobenius decay


@dataclass(frozen=True)
class Claim:
    """That one arm does better than another."""

    text: str
    better: str
    worse: str


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    name: str
    measure: str  # what the score is
    digits: int
    higher: bool  # whether more is better
    claims: tuple[Claim, ...]


def options(text: str | None) -> argparse.ArgumentParser:
    """The command line that the benchmarks share."""
    ask = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data", type=Path, help="where the data is")
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask.add_argument("--arms", nargs="+", default=["*"], help="names or patterns of arms; the default is all")
    ask.add_argument("--out", type=Path, help="append each result to this file, a JSON line an arm and seed")
    ask.add_argument("--table", type=Path, nargs="+", help="no training: the table of these result files")
    return ask


def about(name: str, **settings: Any) -> Line:
    """What results were made with; printed, and kept with each of them."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    told = {
        "benchmark": name, **settings,
        "device": device, "torch": torch.__version__, "pufferfish": pf.__version__,
    }  # fmt: skip
    print(f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in told.items()), "\n")
    return told


def main(
    benchmark: Benchmark,
    given: argparse.Namespace,
    start: Callable[[int, torch.device], Run],
    arms: dict[str, Arm],
    turns: int,
    **settings: Any,
) -> None:
    """Train all seeds and arms that were asked for, then print the table; or the table of files alone."""
    if given.table:
        print(table(benchmark, read(given.table, benchmark.name)))
        return
    if given.data is None:
        raise SystemExit("--data is needed")
    wanted = chosen(given.arms, ["dense", *arms])
    settings = about(benchmark.name, **settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = []
    for seed in given.seeds:
        run = start(seed, device)
        for found in branches(
            run, {n: arm for n, arm in arms.items() if n in wanted}, turns, "dense" in wanted
        ):
            line = {"seed": seed, **found, "settings": settings}
            lines.append(line)
            append(given.out, [line])
            score = f"{line['score']:.{benchmark.digits}f}"
            print(f"seed {seed}  {line['arm']:32} {score:>8}  {line['seconds']:5.0f} s", flush=True)
    print("\n" + table(benchmark, lines))


def chosen(patterns: list[str], names: list[str]) -> list[str]:
    """The names that match, in their own order."""
    found = [fnmatch.filter(names, pattern) for pattern in patterns]
    for pattern, some in zip(patterns, found, strict=True):
        if not some:
            raise SystemExit(f"--arms: {pattern!r} is none of " + ", ".join(map(repr, names)))
    matched = set().union(*found)
    return [name for name in names if name in matched]


def branches(run: Run, arms: dict[str, Arm], turns: int, dense: bool) -> Iterator[Line]:
    """The results of all arms, each trained from the moment of its switch; last the dense run's own."""
    waiting = {name: (arm, arm.switch()) for name, arm in arms.items()}
    spent = 0.0
    for turn in range(turns):
        for name, (arm, switch) in list(waiting.items()):
            if switch.due(run.model, epoch=turn, total=turns):
                del waiting[name]
                yield branch(name, run.copy(), arm, switch, turn, turns)
        if not (waiting or dense):
            return
        spent += timed(run, turn, turns)
    if waiting:
        raise SystemExit(f"in {turns} turns the switch was never due: " + ", ".join(waiting))
    if dense:
        yield result("dense", run, None, spent)


def branch(name: str, run: Run, arm: Arm, switch: pf.Switch, at: int, turns: int) -> Line:
    with torch.random.fork_rng():  # dropout here must not change what the dense run goes on with
        decay = None if arm.decay is None else pf.FrobeniusDecay(run.model, run.optimizer, arm.decay)
        switched = switch.step(run.model, run.optimizer, epoch=at, total=turns)
        assert switched, name
        spent = sum(timed(run, turn, turns) for turn in range(at, turns))
        if decay is not None:
            decay.remove()
        return result(name, run, at, spent)


def timed(run: Run, turn: int, turns: int) -> float:
    """One turn; how many seconds it took."""
    begun = time.perf_counter()
    run.advance(turn, turns)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def result(name: str, run: Run, switched: int | None, seconds: float) -> Line:
    parameters = sum(p.numel() for p in run.model.parameters())
    return {
        "arm": name, "score": run.score(), "parameters": parameters, "switched": switched, "seconds": seconds,
    }  # fmt: skip


def read(files: list[Path], name: str) -> list[Line]:
    lines: list[Line] = []
    for file in files:
        lines += [json.loads(text) for text in file.read_text().splitlines() if text.strip()]
    kinds = {json.dumps(line["settings"], sort_keys=True) for line in lines}
    if len(kinds) != 1 or lines[0]["settings"]["benchmark"] != name:
        raise SystemExit(f"not results of {name} with one setting:\n" + "\n".join(sorted(kinds)))
    return lines


def earlier(out: Path | None, settings: Line) -> list[Line]:
    """What is in --out already, of an earlier start with the same settings."""
    if out is None or not out.exists() or not out.stat().st_size:
        return []
    lines = read([out], settings["benchmark"])
    if lines[0]["settings"] != settings:
        raise SystemExit(f"{out} has results with {lines[0]['settings']}, not {settings}")
    return lines


def append(out: Path | None, lines: list[Line]) -> None:
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def by_arm(lines: list[Line]) -> dict[str, dict[int, Line]]:
    """Arm → seed → its one result."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        if line["seed"] in found.setdefault(line["arm"], {}):
            raise SystemExit(f"{line['arm']!r}, seed {line['seed']}: more than one result")
        found[line["arm"]][line["seed"]] = line
    return found


def scored(results: dict[int, Line]) -> dict[int, float]:
    return {seed: line["score"] for seed, line in results.items()}


def table(benchmark: Benchmark, lines: list[Line]) -> str:
    """Means, differences paired by seed with 95 % intervals, and what became of each claim."""
    of = by_arm(lines)
    scores = {arm: scored(found) for arm, found in of.items()}
    digits = benchmark.digits
    rows = [["", "switched at", "parameters", benchmark.measure, "difference to dense", "seeds"]]
    for arm in sorted(scores, key=lambda name: name != "dense"):
        gaps = paired_differences(scores[arm], scores.get("dense", {})) if arm != "dense" else []
        at = sorted({line["switched"] for line in of[arm].values()} - {None})
        size = statistics.mean(line["parameters"] for line in of[arm].values())
        rows.append([
            arm, "–".join(map(str, at[:1] + at[1:][-1:])), f"{size:,.0f}",
            f"{statistics.mean(scores[arm].values()):.{digits}f}", interval(gaps, digits), str(len(scores[arm])),
        ])  # fmt: skip
    text = format_table(rows, left=(0,))
    claims = [c for c in benchmark.claims if c.better in scores and c.worse in scores]
    if claims:
        rows = [["claim", "better by", "verdict"]]
        for claim in claims:
            gaps = paired_differences(scores[claim.better], scores[claim.worse])
            gains = gaps if benchmark.higher else [-gap for gap in gaps]
            rows.append([claim.text, interval(gains, digits), verdict(gains)])
        text += "\n\n" + format_table(rows, left=(0, 2))
    return text


def half_width(gaps: list[float]) -> float:
    """Of the 95 % interval of the mean."""
    if len(gaps) < 2:
        return math.inf
    return t_quantile(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def interval(gaps: list[float], digits: int) -> str:
    if not gaps:
        return ""
    mean = f"{statistics.mean(gaps):+.{digits}f}"
    return mean if len(gaps) == 1 else f"{mean} ± {half_width(gaps):.{digits}f}"


def verdict(gains: list[float]) -> str:
    if len(gains) < 2:
        return "too few seeds"
    mean, half = statistics.mean(gains), half_width(gains)
    if abs(mean) <= half:
        return "not settled: the interval contains 0"
    return "confirmed" if mean > 0 else "the opposite holds"
