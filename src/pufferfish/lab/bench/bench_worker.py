"""`BenchWorker`: a worker of a bench; `python -m pufferfish.lab.bench.bench_worker FOLDER` runs one under torchrun.

One job does all runs and then times the steps of the methods, because starting workers takes longer than many runs.
Rank 0 decides what is next. Events are written to standard output as lines of JSON after an @, for `EventDisplay`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint.sigterm import Sigterm
from ...distributed.workers import Workers
from ...measure.machine import hardware, versions
from ...measure.saved_run import RUN_FILE
from ..advise.timing_rounds import steps_per_round, timing_rounds
from ..network import LinkShape
from ..rivals.pruning_by_name import is_pruning_method
from ..train import train
from ..train.equal_length import EqualLength
from ..train.find_width import find_width
from ..train.narrow_method import NarrowWidth
from ..train.process_group import process_group
from ..train.worker_device import worker_device
from .bench_method import bench_method
from .bench_pieces import length_file, width_file, width_of_method
from .bench_runs import BenchRun, Shard, bench_runs, is_finished
from .bench_settings import load_settings, read_json, write_json
from .choose_rate import choose_rate, untried_runs
from .find_length import find_length
from .models_to_time import models_to_time, untimed_methods
from .predictions import predictions
from .summary import LENGTH, read_rounds

Event = dict[str, Any]
#: Between checkpoints of runs in processes of their own, which take minutes, and may write to one disk at once.
SAVE_SECONDS = 60.0


class BenchWorker:
    """A worker that does one shard of a bench, together with the other workers of its job, or in a single process.

    Args:
        root: folder of the bench, with its bench.json.
        data: folder with the task's data.
        skip: names of runs that failed before.
        link: requested and measured link between the hosts, for the records.
        target_link: link that could not be emulated, for which steps are predicted.
        on_event: called on rank 0 with the events of runs and rounds.
        only: names of the only pieces to do.
        beside: runs that share the device with this one, itself included; above 1 its times are not comparable.
        started: when this process was started, as by `time.time`, for the record of the time that a piece takes.
        stop_requested: whether this worker should stop. All workers stop after a run or a round if any of them should.
    """

    def __init__(
        self,
        root: Path,
        *,
        data: Path | None = None,
        shard: Shard | None = None,
        skip: Sequence[str] = (),
        link: dict[str, Any] | None = None,
        target_link: str | None = None,
        only: Sequence[str] | None = None,
        beside: int = 1,
        started: float | None = None,
        on_event: Callable[[Event], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.root, self.data, self.link = root, data, link
        self.shard = shard or Shard()
        self.target_link = LinkShape.parse(target_link) if target_link else None
        self.failed, self.stop_requested = list(skip), stop_requested
        self.only, self.beside, self._started = only, beside, started
        self.workers = Workers.of_job("bench", side_group=True)
        self.on_event = on_event if self.workers.rank == 0 else lambda event: None
        self.settings = load_settings(root)
        self.task, self.recipe = self.settings.resolve()

    def run(self) -> bool:
        """Do all missing runs and rounds; False if it was stopped before the end."""
        runs = [r for r in bench_runs(self.settings, self.recipe) if self.shard.has_run(r, self.settings)]
        if self.only is not None:
            by_name = {run.name: run for run in runs}
            finished = [self._do(name, by_name) for name in self.only]
            return all(finished)
        for number, run in enumerate(runs, 1):
            lr = self.workers.run_on_first(lambda run=run: self._rate(run))  # type: ignore[misc]
            if self._stopped() or (lr is not None and not self._train(run, lr, number, len(runs))):
                return False
        return not self.settings.timed or self._time_steps()

    def _do(self, name: str, runs: Mapping[str, BenchRun]) -> bool:
        """Do one piece, and record how long it took; False if it was stopped."""
        start = self._started or time.time()
        self._started = None  # only the first piece waits for the start of the process
        if name in runs:
            resumed = (self.root / name / RUN_FILE).exists()
            lr = self._rate(runs[name])
            finished = lr is None or self._train(runs[name], lr, 1, 1)
            if finished and is_finished(self.root / name):
                self._record_sharing(self.root / name, None if resumed else time.time() - start)
            return finished
        with self._report_failure(name):
            record = self._measure(name) | {"hardware": hardware(), "versions": versions()}
            write_json(self.root / name, record | {"wall_seconds": time.time() - start})
        return True

    def _measure(self, name: str) -> dict[str, Any]:
        """The width or the updates of a method, whichever is kept in the file of this name."""
        for method in self.settings.methods:
            if name == width_file(method):
                return {"method": method, "width": dataclasses.asdict(self._measured_width(method))}
            if self.root / name == length_file(method, self.settings, self.root):
                return {"method": method, "length": dataclasses.asdict(self._measured_length(method))}
        raise ValueError(f"{name}: not a piece of this bench")

    def _record_sharing(self, folder: Path, seconds: float | None) -> None:
        """Add the seconds of the process to a run, if one did it all; times measured beside other runs are kept apart."""
        run = read_json(folder / RUN_FILE, "")
        results = run["results"]
        if self.beside > 1:
            names = ("seconds_a_step", "training_seconds")
            results["shared"] = {"beside": self.beside} | {n: results.pop(n) for n in names if n in results}
        if seconds is not None:
            results["wall_seconds"] = seconds
        write_json(folder / RUN_FILE, run)

    def _measured_width(self, method: str) -> NarrowWidth:
        recipe = bench_method(method).recipe(self.recipe)
        settings = self.settings.run_settings(method, recipe, data=self.data)
        return find_width(
            self.task, settings, self._loaded, self.workers, worker_device(self.settings.device)
        )

    def _measured_length(self, method: str) -> EqualLength:
        device = worker_device(self.settings.device)
        equal = "time" if self.settings.equal == "steps" else self.settings.equal
        settings = dataclasses.replace(self.settings, equal=equal)
        return find_length(method, settings, self.root, self._loaded, self.workers, device, self.target_link)

    @cached_property
    def _loaded(self) -> Any:
        """The task's data, for all measurements of this process."""
        return self.task.load(self.data)

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
        recipe = dataclasses.replace(bench_method(run.method).recipe(self.recipe), lr=lr)
        if run.lr is not None:
            recipe = recipe.override(epochs=self.settings.tune_epochs)
        results: Any = {}
        with self._report_failure(run.name):
            width = self.workers.run_on_first(
                lambda: width_of_method(run.method, self.settings, self.recipe, self.root)
            )
            settings = self.settings.run_settings(
                run.method,
                recipe,
                folder,
                data=self.data,
                seed=run.seed,
                narrow=width and NarrowWidth(**width),
                equal_length=self._equal_length(run),
                **({} if self.only is None else {"save_seconds": SAVE_SECONDS}),
            )
            results = train(self.task, settings, link=self.link)
        if results:
            score = {"measure": self.task.metric, "score": results[self.task.metric]}
            self.on_event({"done": run.name, "seconds": time.perf_counter() - start, **score})
            is_pruned = is_pruning_method(bench_method(run.method).method.model)  # whose model is timed later
            unneeded = run.lr is not None or (self.only is not None and not is_pruned)
            if unneeded and self.workers.rank == 0:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return results is not None

    def _equal_length(self, run: BenchRun) -> EqualLength | None:
        """The updates of a run at equal time or bytes, measured once for all seeds; None at equal steps."""
        if run.equal == "steps":
            return None
        path = (self.root / run.name).with_name(LENGTH)
        saved = self.workers.run_on_first(lambda: read_json(path, "") if path.is_file() else None)
        if saved is not None:
            return EqualLength(**saved["length"])
        self.on_event({"measuring": run.method})
        found = self._measured_length(run.method)
        record = {"method": run.method, "length": dataclasses.asdict(found)}
        self.workers.run_on_first(lambda: write_json(path, record))
        return found

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
            suffix = "" if self.shard.count == 1 else f"-{self.shard.number}of{self.shard.count}"
            rounds = timing_rounds(models, self.settings.rounds, steps, first)
            for number in range(self.settings.rounds):
                self.on_event({"round": number + 1, "of": self.settings.rounds})
                timings = next(rounds)
                if self.workers.rank == 0:
                    path = self.root / f"timing/round-{first + number}{suffix}.json"
                    write_json(path, common | {"methods": timings})
                if self._stopped():
                    return False
        return True

    def _missing_rounds(self) -> tuple[list[str], int]:
        """Methods to time, without those whose runs failed, and the number of rounds so far."""
        failed = {run.method for run in bench_runs(self.settings, self.recipe) if run.name in self.failed}
        missing = untimed_methods(self.settings, self.root)
        methods = [m for m in missing if self.shard.has_timing(m, self.settings) and m not in failed]
        return methods, len(read_rounds(self.root))

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
    options = arguments.options | {"shard": Shard.parse(arguments.options["shard"])}
    options["data"] = Path(options["data"]) if options["data"] else None
    if options.get("only"):
        _end_with_parent()
        worker = BenchWorker(arguments.root, on_event=write_event, **options)
        sys.exit(0 if worker.run() and worker.failed == options["skip"] else 1)
    sigterm = Sigterm()
    sigterm.catch()  # a worker that ends on SIGTERM between two runs would leave the others waiting
    with process_group(load_settings(arguments.root).device):
        BenchWorker(
            arguments.root, on_event=write_event, stop_requested=lambda: sigterm.seen, **options
        ).run()
        dist.barrier()


def _end_with_parent() -> None:
    """Send SIGTERM to this process, which saves a checkpoint, when its parent closes the pipe to it or dies."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
