"""A study of a line, fitted in 6 updates, each of which is saved: quick runs that can be killed and resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from pufferfish.lab.harness import Job, Row, Study


def run(job: Job) -> Row:
    """A file named by KILL ends the whole command in the middle of one of the runs."""
    saved = job.folder / "state.json"
    step, weight, velocity = json.loads(saved.read_text()) if saved.exists() else (0, job.seed + 2.0, 0.0)
    while step < 6:
        velocity = (0.9 if job.arm == "momentum" else 0.0) * velocity + 2 * (weight - 1)
        step, weight = step + 1, weight - job.rate * velocity
        (job.folder / "new.json").write_text(json.dumps([step, weight, velocity]))
        (job.folder / "new.json").rename(saved)
        kill = Path(os.environ.get("KILL", "-"))
        if step == 4 and (job.arm, job.seed) == ("momentum", 1) and kill.exists():
            kill.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
    loss = (weight - 1) ** 2
    return {"validation": loss, "test": loss + 1, "weight": weight}


LINES = Study(
    name="lines", run=run, arms={"plain": (0.01, 0.1, 1e60), "momentum": (0.1,)}, seeds=(0, 1), baseline="plain",
    score="loss", higher=False, settings={"updates": 6},
)  # fmt: skip
