"""`BenchWorker`: a worker of a bench; `python -m pufferfish.lab.bench.bench_worker FOLDER` runs one under torchrun.

One job does all runs and then times the steps of the methods, because starting workers takes longer than many runs.
Rank 0 decides what is next. What is finished, and what has failed, is in the folder of the bench.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint.process import Sigterm
from ...distributed.workers import Workers
from ..method_name import training_method
from ..network import LinkShape
from ..report.formatting import format_score, format_seconds
from ..train import train
from ..train.console import Console
from ..train.timing import steps_per_round, timing_rounds
from ..train.workers import launch_info, process_group, worker_device
from .bench_settings import (
    BenchRun,
    bench_runs,
    choose_rate,
    is_finished,
    load_settings,
    untried_runs,
    write_json,
)
from .timing import models_to_time, predictions, read_rounds, untimed_methods

#: In the folder of a run that has failed: why. The timed rounds count as a run.
FAILED, TIMING = "failed.txt", "timing"


def failed_runs(root: Path) -> list[str]:
    """Runs that have failed since the bench was started, by their folders."""
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob(FAILED))


class BenchWorker:
    """A worker that does a bench, together with the other workers of its job, or in a single process.

    Args:
        root: folder of the bench, with its bench.json.
        data: folder with the task's data.
        stop_requested: whether this worker should stop. All workers stop after a run or a round if any of them should.
    """

    def __init__(
        self, root: Path, *, data: Path | None = None, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        self.root, self.data, self.stop_requested = root, data, stop_requested
        launch = launch_info()
        self.link, target = launch.get("link"), launch.get("unshaped")
        self.target_link = LinkShape.parse(target) if target else None  # for which steps are predicted
        self.workers = Workers.of_job("bench", side_group=True)
        self.console = Console(silent=self.workers.rank > 0)
        self.settings = load_settings(root)
        self.task, self.recipe = self.settings.resolve()
        self.run_seconds: list[float] = []

    def run(self) -> bool:
        """Do all missing runs and rounds; False if it was stopped before the end."""
        runs = list(bench_runs(self.settings, self.recipe))
        for number, run in enumerate(runs, 1):
            lr = self.workers.run_on_first(lambda run=run: self._rate(run))  # type: ignore[misc]
            if self._stopped() or (lr is not None and not self._train(run, lr, number, len(runs))):
                return False
        return not self.settings.timed or self._time_steps()

    def _stopped(self) -> bool:
        return any(self.workers.gather(self.stop_requested))

    def _rate(self, run: BenchRun) -> float | None:
        """The learning rate of a run; None if the run is finished, not needed, or cannot be started."""
        failed = failed_runs(self.root)
        if run.name in failed or is_finished(self.root / run.name):
            return None
        of_bench = (self.settings, self.root, self.task, self.recipe, failed)
        if run.lr is not None:
            return run.lr if run in untried_runs(run.method, *of_bench) else None
        rate = choose_rate(run.method, *of_bench)
        if rate is None:
            self._fail(run.name, "not started, because no learning rate of its method could be tried")
        return rate.lr if rate else None

    def _train(self, run: BenchRun, lr: float, number: int, count: int) -> bool:
        """Do a run; False if it was stopped."""
        folder, start = self.root / run.name, time.perf_counter()
        position, left = f"[{number}/{count}] {run.name}", ""
        if self.run_seconds:
            seconds = statistics.mean(self.run_seconds) * (count - number + 1)
            left = f", about {format_seconds(seconds)} left for the runs"
        self.console.progress(f"{position}{left} …")
        recipe = dataclasses.replace(training_method(run.method).recipe(self.recipe), lr=lr)
        results: Any = {}
        with self._report_failure(run.name):
            more: dict[str, Any] = {"data": self.data, "seed": run.seed, "brief": f"{position}{left}: "}
            settings = self.settings.run_settings(run.method, recipe, folder, **more)
            results = train(self.task, settings, link=self.link)
        if results:
            self.run_seconds.append(time.perf_counter() - start)
            score = format_score(self.task.metric, results[self.task.metric])
            self.console.info(f"{position}: {score}, {format_seconds(self.run_seconds[-1])}")
            if run.lr is not None and self.workers.rank == 0:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return results is not None

    def _time_steps(self) -> bool:
        """Time the methods that lack rounds, together with the references; False if it was stopped."""
        methods, first = self.workers.run_on_first(self._missing_rounds)
        if not methods:
            return True
        with self._report_failure(TIMING):
            models = models_to_time(
                list(dict.fromkeys([*self.settings.references, *methods])), self.settings, self.root,
                self.task.load(self.data), worker=self.workers.rank, workers=self.workers.size,
                device=worker_device(self.settings.device),
            )  # fmt: skip
            self.console.info(f"timing the steps of {', '.join(models)} …")
            steps = steps_per_round(models)
            predicted = {}
            if self.workers.size > 1:
                self.console.progress("measuring computation and compression, to predict these steps …")
                predicted = predictions(models, self.target_link)
            target_link = self.target_link and str(self.target_link)
            common = {"steps": steps, "link": self.link, "target_link": target_link, "predicted": predicted}
            rounds = timing_rounds(models, self.settings.rounds, steps, first)
            for number in range(self.settings.rounds):
                self.console.progress(f"round {number + 1} of {self.settings.rounds} …")
                timings = next(rounds)
                if self.workers.rank == 0:
                    path = self.root / f"{TIMING}/round-{first + number}.json"
                    write_json(path, common | {"methods": timings})
                if self._stopped():
                    return False
        return True

    def _missing_rounds(self) -> tuple[list[str], int]:
        """Methods to time, without those whose runs failed, and the number of rounds so far."""
        names = failed_runs(self.root)
        failed = {run.method for run in bench_runs(self.settings, self.recipe) if run.name in names}
        missing = untimed_methods(self.settings, self.root)
        return [method for method in missing if method not in failed], len(read_rounds(self.root))

    def _fail(self, name: str, reason: str) -> None:
        path = self.root / name / FAILED
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason)
        Console().error(f"{name} failed: {reason}")

    @contextmanager
    def _report_failure(self, name: str) -> Iterator[None]:
        """Record an exception. With several workers it also ends this one, as others wait for it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._fail(name, f"{type(error).__name__}: {error}"[:1000])
            if self.workers.size > 1:
                os._exit(1)


def main() -> None:
    """Run a worker under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    sigterm = Sigterm()
    sigterm.catch()  # a worker that ends on SIGTERM between two runs would leave the others waiting
    with process_group(load_settings(arguments.root).device):
        BenchWorker(arguments.root, data=arguments.data, stop_requested=lambda: sigterm.seen).run()
        dist.barrier()


if __name__ == "__main__":
    main()
