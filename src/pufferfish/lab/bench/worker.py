"""What every worker of a bench does: `python -m pufferfish.lab.bench.work FOLDER`, under torchrun.

One job runs all cells one after the other, then times the methods' steps: starting workers takes longer than many a
cell. Rank 0 decides what is next and tells the others. What happens goes to the standard output in lines of JSON
behind an @, for whoever started the job.
"""

from __future__ import annotations

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

from ...checkpoint.control import Control, Sigterm
from ..advise.timing_rounds import interleaved, steps_a_turn
from ..network import Shape
from ..tasks.task import Recipe
from ..train import Settings, train
from ..train.process_group import job, place
from .bench_settings import Asked, load, write_json
from .cells import Cell, Shard, cells, finished
from .entry import entry
from .predictions import predictions
from .summary import rounds_of
from .timed_models import contenders, lacking
from .tuned_rate import rate_of

Say = Callable[[dict[str, Any]], None]


class Work:
    """One call's share of a bench, to be done by all ranks of a job, or by this process alone.

    Args:
        data: where the task's data lies.
        skip: names of cells that failed before.
        link: what the hosts' link was asked to be, and gave.
        elsewhere: the link that could not be emulated, to predict steps for.
        say: hears of every cell and round, on rank 0.
        stopping: whether this rank was asked to stop; between cells and rounds all stop then.
    """

    def __init__(
        self,
        root: Path,
        *,
        data: Path | None = None,
        shard: Shard | None = None,
        skip: Sequence[str] = (),
        link: dict[str, Any] | None = None,
        elsewhere: str | None = None,
        say: Say,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.root, self.data, self.link = root, data, link
        self.shard = shard or Shard()
        self.elsewhere = Shape.parse(elsewhere) if elsewhere else None
        self.failed, self.stopping = list(skip), stopping
        self.control = Control()
        self.rank, self.size = self.control.rank, self.control.size
        self.say: Say = say if self.rank == 0 else lambda told: None
        self.asked = load(root)
        self.task, self.recipe = self.asked.found()

    def go(self) -> bool:
        """All that is left to do; False when it was asked to stop before the end."""
        mine = [cell for cell in cells(self.asked, self.recipe) if self.shard.takes(cell, self.asked)]
        for number, cell in enumerate(mine, 1):
            lr = self.control.first(lambda cell=cell: self._rate(cell))  # type: ignore[misc]
            if self._stops() or (lr is not None and not self._run(cell, lr, number, len(mine))):
                return False
        return not self.asked.timed or self._time()

    def _stops(self) -> bool:
        return any(self.control.gather(self.stopping))

    def _rate(self, cell: Cell) -> float | None:
        """That a cell is to run with; None when it is done, or cannot be."""
        if cell.name in self.failed or finished(self.root / cell.name):
            return None
        if cell.lr is not None:
            return cell.lr
        found = rate_of(cell.method, self.asked, self.root, self.task, self.recipe, self.failed)
        if found is None:
            self._fail(cell.name, "not started, as no learning rate of its method could be tried")
        return found.lr if found else None

    def _run(self, cell: Cell, lr: float, number: int, of: int) -> bool:
        """False when it was asked to stop."""
        folder = self.root / cell.name
        self.say({"begin": cell.name, "number": number, "of": of})
        begun = time.perf_counter()
        recipe = dataclasses.replace(entry(cell.method).recipe(self.recipe), lr=lr)
        given = dataclasses.replace(
            settings(self.asked, cell.method, recipe, folder), data=self.data, seed=cell.seed
        )
        found: Any = {}
        with self._named(cell.name):
            found = train(self.task, given, link=self.link)
        if found:
            score = {"measure": self.task.measure, "score": found[self.task.measure]}
            self.say({"done": cell.name, "seconds": time.perf_counter() - begun, **score})
            if cell.lr is not None and self.rank == 0:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return found is not None

    def _time(self) -> bool:
        """Rounds for the methods that lack some, with the references in each; False when it was asked to stop."""
        wanted, first = self.control.first(self._untimed)
        if not wanted:
            return True
        with self._named("timing"):
            racing = contenders(
                list(dict.fromkeys([*self.asked.references, *wanted])), self.asked, self.root,
                self.task.load(self.data), rank=self.rank, size=self.size, device=place(self.asked.device),
            )  # fmt: skip
            self.say({"timing": list(racing)})
            steps = steps_a_turn(racing)
            said = predictions(racing, self.elsewhere) if self.size > 1 else {}
            elsewhere = self.elsewhere and str(self.elsewhere)
            about = {"steps": steps, "link": self.link, "elsewhere": elsewhere, "predicted": said}
            tag = "" if self.shard.of == 1 else f"-{self.shard.number}of{self.shard.of}"
            for n, found in enumerate(interleaved(racing, self.asked.rounds, steps, first), first):
                if self.rank == 0:
                    write_json(self.root / f"timing/round-{n}{tag}.json", about | {"methods": found})
                self.say({"round": n - first + 1, "of": self.asked.rounds})
                if self._stops():
                    return False
        return True

    def _untimed(self) -> tuple[list[str], int]:
        """Methods of which rounds are missing, without those that cannot be trained; how many rounds there are."""
        failed = {cell.method for cell in cells(self.asked, self.recipe) if cell.name in self.failed}
        missing = [m for m in lacking(self.asked, self.root) if self.shard.times(m, self.asked)]
        return [m for m in missing if m not in failed], len(rounds_of(self.root))

    def _fail(self, cell: str, why: str) -> None:
        self.failed.append(cell)
        self.say({"failed": cell, "error": why})

    @contextmanager
    def _named(self, cell: str) -> Iterator[None]:
        """A failure is told with the cell's name. Among several workers it ends this one, as others wait for it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:1000]  # a longer line might be torn
            if self.size == 1:
                self._fail(cell, why)
                return
            speak({"failed": cell, "error": why})
            sys.stderr.flush()
            os._exit(1)


def settings(asked: Asked, method: str, recipe: Recipe, folder: Path) -> Settings:
    """What a method's runs are told."""
    simulated: dict[str, Any] = {"simulate": asked.workers} if asked.simulate else {}
    if asked.simulate and asked.network:
        simulated["network"] = asked.network
    return Settings(
        entry(method).choice, recipe, folder, name=method, device=asked.device, precision=asked.precision,
        graph=asked.graph, hosts=asked.hosts, **simulated,
    )  # fmt: skip


def speak(told: dict[str, Any]) -> None:
    """To whoever started this job: a line of its own in one write, for all workers share the pipe."""
    os.write(1, f"\n@{json.dumps(told)}\n".encode())


def main() -> None:
    """See the module."""
    ask = argparse.ArgumentParser()
    ask.add_argument("root", type=Path)
    ask.add_argument("--given", type=json.loads, required=True)
    told = ask.parse_args()
    given = told.given | {"shard": Shard.parse(told.given["shard"])}
    given["data"] = Path(given["data"]) if given["data"] else None
    asked_to_stop = Sigterm()  # one that dies of it between two runs would leave the others waiting
    with job(load(told.root).device):
        Work(told.root, say=speak, stopping=lambda: asked_to_stop.seen, **given).go()
        dist.barrier()


if __name__ == "__main__":
    main()
