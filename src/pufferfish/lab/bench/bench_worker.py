"""`BenchWorker`: a worker of a bench; `python -m pufferfish.lab.bench.bench_worker FOLDER` runs one under torchrun.

One job does all runs and then times the steps of the methods, because starting workers takes longer than many runs.
Rank 0 decides what is next. Events are written to standard output as lines of JSON after an @, for `EventDisplay`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint.process import Sigterm
from ...distributed.workers import Workers
from ..method_name import training_method
from ..network import LinkShape
from ..train import train
from ..train.timing import steps_per_round, timing_rounds
from ..train.workers import process_group, worker_device
from .bench_settings import BenchRun, is_finished, load_settings, write_json
from .rates import bench_runs, choose_rate, untried_runs
from .timing import models_to_time, predictions, read_rounds, untimed_methods

Event = dict[str, Any]


class BenchWorker:
    """A worker that does a bench, together with the other workers of its job, or in a single process.

    Args:
        root: folder of the bench, with its bench.json.
        data: folder with the task's data.
        skip: names of runs that failed before.
        link: requested and measured link between the hosts, for the records.
        target_link: link that could not be emulated, for which steps are predicted.
        on_event: called on rank 0 with the events of runs and rounds.
        stop_requested: whether this worker should stop. All workers stop after a run or a round if any of them should.
    """

    def __init__(
        self,
        root: Path,
        *,
        data: Path | None = None,
        skip: Sequence[str] = (),
        link: dict[str, Any] | None = None,
        target_link: str | None = None,
        on_event: Callable[[Event], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.root, self.data, self.link = root, data, link
        self.target_link = LinkShape.parse(target_link) if target_link else None
        self.failed, self.stop_requested = list(skip), stop_requested
        self.workers = Workers.of_job("bench", side_group=True)
        self.on_event = on_event if self.workers.rank == 0 else lambda event: None
        self.settings = load_settings(root)
        self.task, self.recipe = self.settings.resolve()

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
        if run.name in self.failed or is_finished(self.root / run.name):
            return None
        of_bench = (self.settings, self.root, self.task, self.recipe, self.failed)
        if run.lr is not None:
            return run.lr if run in untried_runs(run.method, *of_bench) else None
        rate = choose_rate(run.method, *of_bench)
        if rate is None:
            self._fail(run.name, "not started, because no learning rate of its method could be tried")
        return rate.lr if rate else None

    def _train(self, run: BenchRun, lr: float, number: int, count: int) -> bool:
        """Do a run; False if it was stopped."""
        folder = self.root / run.name
        self.on_event({"begin": run.name, "number": number, "of": count})
        start = time.perf_counter()
        recipe = dataclasses.replace(training_method(run.method).recipe(self.recipe), lr=lr)
        results: Any = {}
        with self._report_failure(run.name):
            settings = self.settings.run_settings(
                run.method,
                recipe,
                folder,
                data=self.data,
                seed=run.seed,
            )
            results = train(self.task, settings, link=self.link)
        if results:
            score = {"measure": self.task.metric, "score": results[self.task.metric]}
            self.on_event({"done": run.name, "seconds": time.perf_counter() - start, **score})
            if run.lr is not None and self.workers.rank == 0:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return results is not None

    def _time_steps(self) -> bool:
        """Time the methods that lack rounds, together with the references; False if it was stopped."""
        methods, first = self.workers.run_on_first(self._missing_rounds)
        if not methods:
            return True
        with self._report_failure("timing"):
            models = models_to_time(
                list(dict.fromkeys([*self.settings.references, *methods])), self.settings, self.root,
                self.task.load(self.data), worker=self.workers.rank, workers=self.workers.size,
                device=worker_device(self.settings.device),
            )  # fmt: skip
            self.on_event({"timing": list(models)})
            steps = steps_per_round(models)
            if self.workers.size > 1:
                self.on_event({"predicting": list(models)})
            predicted = predictions(models, self.target_link) if self.workers.size > 1 else {}
            target_link = self.target_link and str(self.target_link)
            common = {"steps": steps, "link": self.link, "target_link": target_link, "predicted": predicted}
            rounds = timing_rounds(models, self.settings.rounds, steps, first)
            for number in range(self.settings.rounds):
                self.on_event({"round": number + 1, "of": self.settings.rounds})
                timings = next(rounds)
                if self.workers.rank == 0:
                    path = self.root / f"timing/round-{first + number}.json"
                    write_json(path, common | {"methods": timings})
                if self._stopped():
                    return False
        return True

    def _missing_rounds(self) -> tuple[list[str], int]:
        """Methods to time, without those whose runs failed, and the number of rounds so far."""
        failed = {run.method for run in bench_runs(self.settings, self.recipe) if run.name in self.failed}
        missing = untimed_methods(self.settings, self.root)
        return [method for method in missing if method not in failed], len(read_rounds(self.root))

    def _fail(self, name: str, reason: str) -> None:
        self.failed.append(name)
        self.on_event({"failed": name, "error": reason})

    @contextmanager
    def _report_failure(self, name: str) -> Iterator[None]:
        """Report an exception as an event. With several workers it also ends this one, as others wait for it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            # One write to a pipe is atomic up to 4096 bytes.
            reason = f"{type(error).__name__}: {error}"[:1000]
            if self.workers.size == 1:
                self._fail(name, reason)
                return
            write_event({"failed": name, "error": reason})
            sys.stderr.flush()
            os._exit(1)


def write_event(event: Event) -> None:
    """Write an event to standard output as a line of its own, in one write, as all workers share the pipe."""
    os.write(1, f"\n@{json.dumps(event)}\n".encode())


def main() -> None:
    """Run a worker under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--options", type=json.loads, required=True, help="arguments of BenchWorker, as JSON")
    arguments = parser.parse_args()
    options = arguments.options
    options["data"] = Path(options["data"]) if options["data"] else None
    sigterm = Sigterm()
    sigterm.catch()  # a worker that ends on SIGTERM between two runs would leave the others waiting
    with process_group(load_settings(arguments.root).device):
        BenchWorker(
            arguments.root, on_event=write_event, stop_requested=lambda: sigterm.seen, **options
        ).run()
        dist.barrier()


if __name__ == "__main__":
    main()
