"""Studies: arms × learning rates × seeds, one row of a JSON Lines file for each finished run.

A script defines its studies and calls `main`:

    python benchmarks/given.py minilm-0.3 --processes 2      # run what is missing; killed, the same command continues
    python benchmarks/given.py minilm-0.3 --show             # print the table
    python benchmarks/given.py --pause                       # stop all runs, until --continue

All arms are tuned alike: every rate of an arm is tried with the first seed, validation chooses, and the other seeds use
the chosen rate. The test score of a run is in its row, and plays no part in the choice. A row with `resumed` has the
seconds since the run was last resumed only, which the table shows by ≥.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..measure.run_log import hardware, versions
from ..planning.text import Table
from .report.comparison import estimate, paired_differences

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run. `folder` is its own, for checkpoints: it is kept if the run is killed, and removed when it has finished."""

    study: str
    arm: str
    rate: float
    seed: int
    settings: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison.

    Args:
        run: trains one job and returns at least `validation` and `test`. A function of a module, so that another process
            can import it.
        arms: name → the rates to try; one rate is not tuned.
        baseline: the arm from which differences are printed.
        score: what `validation` and `test` are, with the unit.
        higher: whether a higher score is better.
        digits: of a printed score.
        columns: further values of a row to print: heading → format of the mean over the seeds.
        settings: everything else that a result depends on, such as the number of epochs; numbers and strings.
    """

    name: str
    run: Callable[[Job], Row]
    arms: Mapping[str, Sequence[float]]
    seeds: Sequence[int] = (0, 1, 2)
    baseline: str
    score: str
    higher: bool = True
    digits: int = 2
    columns: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def main(studies: Sequence[Study], description: str | None = None, processes: int | None = None) -> None:
    """The command line of a script with studies. `processes`: runs at a time; None: one a core."""
    by_name = {study.name: study for study in studies}
    ask = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("names", nargs="*", metavar="STUDY", help=f"{', '.join(by_name)}; the default is all")
    ask.add_argument("--show", action="store_true", help="print the tables of finished runs")
    ask.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of STUDY.jsonl")
    ask.add_argument("--work", type=Path, default=Path("runs/studies"), help="folder of unfinished runs")
    processes = processes or os.cpu_count()
    ask.add_argument("--processes", type=int, default=processes, help=f"runs at a time; default: {processes}")
    ask.add_argument("--minutes", type=float, default=math.inf, help="start no run later than this")
    ask.add_argument("--arms", nargs="+", help="run only these arms")
    ask.add_argument("--pause", action="store_true", help="pause all runs of --work")
    ask.add_argument("--continue", dest="resume", action="store_true", help="continue them")
    given = ask.parse_args()
    if unknown := set(given.names) - by_name.keys():
        ask.error(f"unknown study {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    chosen = [by_name[name] for name in given.names] or list(studies)
    if given.pause or given.resume:
        stopped = signal_runs(given.work, signal.SIGSTOP if given.pause else signal.SIGCONT)
        print(f"{'paused' if given.pause else 'continued'} {stopped} processes")
    elif given.show:
        print("\n\n".join(table(study, read_rows(study, given.results)) for study in chosen))
    else:
        run_studies(chosen, given.results, given.work, given.processes, given.minutes, given.arms)


def run_studies(
    studies: Sequence[Study],
    results: Path,
    work: Path,
    processes: int,
    minutes: float = math.inf,
    arms: Sequence[str] | None = None,
) -> None:
    """Run all jobs of the studies that have no row yet, `processes` at a time, and append their rows to `results`."""
    deadline = time.monotonic() + 60 * minutes
    results.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the children import torch
    spawn = multiprocessing.get_context("spawn")
    with only_one(work), ProcessPoolExecutor(processes, spawn, _follow_parent, (os.getpid(),)) as pool:
        running: dict[Future[Row], tuple[Study, Job]] = {}
        failed: set[Path] = set()
        while True:
            taken = {job.folder for _, job in running.values()} | failed
            due = [
                (study, job)
                for study in studies
                for job in jobs(study, read_rows(study, results), work)
                if job.folder not in taken and (arms is None or job.arm in arms)
            ]
            for study, job in due[: processes - len(running)] if time.monotonic() < deadline else ():
                running[pool.submit(_run, study, job)] = study, job
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                study, job = running.pop(done)
                try:
                    row = done.result()
                except Exception as error:
                    failed.add(job.folder)
                    print(
                        f"{study.name}: {job.arm}, rate {job.rate:g}, seed {job.seed} failed: {error!r}",
                        file=sys.stderr,
                    )
                else:
                    append_row(study, results, row)
                    shutil.rmtree(job.folder, ignore_errors=True)
                    print(_line(study, row), flush=True)
        if failed:
            raise SystemExit(f"{len(failed)} runs failed; the same command tries them again")


def jobs(study: Study, rows: Sequence[Row], work: Path) -> Iterator[Job]:
    """The jobs that are due: first every rate of every arm with the first seed, then the chosen rates with the others."""
    there = {(row["arm"], row["rate"], row["seed"]) for row in rows}
    first, *others = study.seeds
    chosen = best_rates(study, rows)
    wanted = [(arm, rate, first) for arm, rates in study.arms.items() for rate in rates]
    wanted += [(arm, chosen[arm], seed) for seed in others for arm in study.arms if arm in chosen]
    for arm, rate, seed in wanted:
        if (arm, rate, seed) not in there:
            key = json.dumps([study.name, arm, rate, seed, dict(study.settings)])
            folder = work / study.name / hashlib.sha256(key.encode()).hexdigest()[:16]
            yield Job(study=study.name, arm=arm, rate=rate, seed=seed, settings=study.settings, folder=folder)


def best_rates(study: Study, rows: Sequence[Row]) -> dict[str, float]:
    """Arm → the rate with the best validation score of the first seed, for arms of which every rate has been tried."""
    best = {}
    for arm, rates in study.arms.items():
        tried = {
            row["rate"]: row["validation"]
            for row in rows
            if (row["arm"], row["seed"]) == (arm, study.seeds[0])
        }
        if all(rate in tried for rate in rates):
            best[arm] = max(rates, key=lambda rate: _goodness(study, tried[rate]))
    return best


def _goodness(study: Study, score: float | None) -> float:
    """Higher is better; a diverged run, whose score is None, is the worst."""
    return -math.inf if score is None else score if study.higher else -score


def table(study: Study, rows: Sequence[Row]) -> str:
    """Means of the test scores at the chosen rates, and differences from the baseline, paired by seed, with 95 % intervals."""
    chosen = best_rates(study, rows)
    of: dict[str, list[Row]] = {
        arm: [row for row in rows if (row["arm"], row["rate"]) == (arm, chosen[arm])]
        for arm in study.arms
        if arm in chosen
    }
    scores = {
        arm: {row["seed"]: row["test"] for row in found if row["test"] is not None}
        for arm, found in of.items()
    }
    head = ["", "rate", study.score, f"difference from {study.baseline}", "seeds", *study.columns, "minutes"]
    lines = [head]
    for arm, found in of.items():
        mean, gap = (
            estimate(list(values))
            for values in (
                scores[arm].values(),
                paired_differences(scores[arm], scores.get(study.baseline, {})),
            )
        )
        rates = study.arms[arm]
        edge = " (edge)" if len(rates) > 1 and chosen[arm] in (min(rates), max(rates)) else ""
        difference = ""
        if gap is not None and arm != study.baseline:
            difference = f"{gap.mean:+.{study.digits}f}" + (
                f" ± {gap.half:.{study.digits}f}" if gap.half else ""
            )
        values = [statistics.fmean(row[key] for row in found) for key in study.columns]
        lines.append([
            arm, f"{chosen[arm]:g}{edge}", f"{mean.mean:.{study.digits}f}" if mean else "diverged", difference,
            str(len(scores[arm])), *(f"{v:{f}}" for v, f in zip(values, study.columns.values(), strict=True)),
            f"{_at_least(found)}{statistics.fmean(row['core_seconds'] for row in found) / 60:.1f}",
        ])  # fmt: skip
    missing = len(list(jobs(study, rows, Path())))
    spent = sum(row["core_seconds"] for row in rows) / 60
    machines = sorted({f"{row['machine']}, torch {row['torch']}" for row in rows})
    text = (
        f"{study.name}: {len(rows)} runs, {_at_least(rows)}{spent:.0f} minutes in all; {'; '.join(machines)}"
    )
    return f"{text}\n{Table(lines, left=(0,))}" + (
        f"\nnot finished: {missing} runs are due now" if missing else ""
    )


def _at_least(rows: Sequence[Row]) -> str:
    """The sign before the time of runs some of which were resumed."""
    return "≥ " if any(row.get("resumed") for row in rows) else ""


def read_rows(study: Study, results: Path) -> list[Row]:
    """The finished runs of a study. Half a line, left by a kill, is not one."""
    path = results / f"{study.name}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    for row in rows:
        if row["settings"] != dict(study.settings):
            raise SystemExit(
                f"{path}: has results with {row['settings']}, not {dict(study.settings)}; use another --results"
            )
    return rows


def append_row(study: Study, results: Path, row: Row) -> None:
    """Append a line, after removing what a kill left of another one."""
    with (results / f"{study.name}.jsonl").open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def signal_runs(work: Path, number: signal.Signals) -> int:
    """Send a signal to the processes that run jobs of `work`; return how many there are."""
    try:
        owner = int((work / "pid").read_text())
        children = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    except (OSError, ValueError):
        return 0
    for child in children:
        os.kill(int(child), number)
    return len(children)


@contextmanager
def only_one(work: Path) -> Iterator[None]:
    """Hold the lock of `work`, in which the process id of its owner is."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "pid").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SystemExit(f"process {file.read().strip()} runs studies in {work} already") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _run(study: Study, job: Job) -> Row:
    """Run a job, in a process of the pool."""
    job.folder.mkdir(parents=True, exist_ok=True)
    resumed = any(job.folder.iterdir())
    began, cpu = time.perf_counter(), time.process_time()
    found = study.run(job)
    cuda = torch.cuda.is_available()
    seconds = time.perf_counter() - began
    about = versions()
    numbers = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in found.items()}
    return {
        "arm": job.arm, "rate": job.rate, "seed": job.seed, **numbers,
        "seconds": round(seconds, 1), "core_seconds": round(seconds if cuda else time.process_time() - cpu, 1),
        "resumed": resumed, "machine": hardware()["gpu"] or hardware()["cpu"], "torch": about["torch"],
        "pufferfish": about["pufferfish"], "commit": about["commit"], "settings": dict(job.settings),
    }  # fmt: skip


def _line(study: Study, row: Row) -> str:
    scores = ", ".join(
        f"{key} {'diverged' if row[key] is None else f'{row[key]:.{study.digits}f}'}"
        for key in ("validation", "test")
    )
    return f"{study.name}: {row['arm']}, rate {row['rate']:g}, seed {row['seed']}: {scores}; {row['seconds']:.0f} s"


def _follow_parent(parent: int) -> None:
    """End this process of the pool with its parent, however that ends, and let everything else go first."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the parent
    os.nice(19)
    torch.set_num_threads(1)
