"""What is lost when workers die: a small training job under torchrun, killed again and again.

    python benchmarks/faults.py [--workers 2 4] [--kills 10] [--steps 120]

A CNN with batch norm, dropout, momentum and a one-cycle schedule trains through a `Switch` and saves a `Checkpoint`
every few steps. Its workers are killed (SIGKILL) at random steps, during the switch and while a checkpoint is
written; torchrun restarts them, and the job must end in the very bits of one that nobody killed: SHA-256 of
parameters, buffers and optimizer state. Then SIGTERM, to one worker and to the launcher: saved, left, resumed, the same bits.
Then the number of workers changes on the way. Exit status 1 if a result differs.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from pufferfish.checkpoint import Checkpoint
from pufferfish.distributed.exact import exact_
from pufferfish.distributed.workers import Workers
from pufferfish.planning.text import Table

SAMPLES = 24  # of every step, shared out among 2, 3 or 4 workers
#: Where a signal can strike, in the order of one step.
POINTS = {
    "switch": "in the switch, between two broadcasts of factors",
    "backward": "before backward",
    "update": "after the update",
    "files": "in a checkpoint, between two files",
    "rename": "in a checkpoint, before its folder gets its name",
}


@dataclass(frozen=True)
class Strike:
    """A signal that `rank` sends itself (or its launcher) in one step, once in the whole job."""

    point: str  # of POINTS
    rank: int
    step: int
    signal: str = "SIGKILL"
    launcher: bool = False


@dataclass(frozen=True)
class Job:
    """What a worker reads from `job.json` in its folder."""

    steps: int
    switch_at: int
    every: int
    strikes: list[Strike] = field(default_factory=list)


@dataclass(frozen=True)
class End:
    """What became of one launch."""

    status: int  # torchrun's
    seconds: float
    struck: int  # signals sent, in all launches of this folder
    starts: int  # of the workers
    steps: int  # updates made, repeated ones too
    left: int  # workers that came to the end of their script
    digests: list[str]  # one a rank; none when the job did not reach its last step
    loss: float  # on a batch of its own
    reset: list[str]  # what the last start could not bring back; empty where it had nothing to resume


# --- the worker ---


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(576, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4),
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Which quarter of the picture is brightest: made, learnable, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return x, F.avg_pool2d(x, 4).flatten(1).argmax(1)


class Fate:
    """Sends the job's signals, each once: a file says that it was sent, and outlives who sent it."""

    def __init__(self, folder: Path, strikes: list[Strike], rank: int) -> None:
        self.step = -1
        self.terminated = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.terminated.set())  # as a job's own handler would
        self.calls: Counter[tuple[str, int]] = Counter()
        self.mine = [
            (s, folder / f"struck-{i}") for i, s in enumerate(strikes) if s.rank == rank and s.point in POINTS
        ]

    def at(self, point: str) -> None:
        self.calls[point, self.step] += 1
        for strike, sent in self.mine:
            # Not the first broadcast or file of a step: the one before it is out.
            due = self.calls[point, self.step] == (2 if point in ("switch", "files") else 1)
            if (strike.point, strike.step) == (point, self.step) and due and not sent.exists():
                sent.touch()
                os.kill(os.getppid() if strike.launcher else os.getpid(), signal.Signals[strike.signal])
                self.terminated.wait(30)  # until the launcher has passed it on

    def before(self, owner: Any, name: str, point: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Strike before each call of a real function."""
        real = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                self.at(point)
            return real(*args, **kwargs)

        setattr(owner, name, called)


def work(folder: Path) -> None:
    """One worker's life, or what a signal leaves of it."""
    die_with_parent()
    torch.set_num_threads(1)
    data = json.loads((folder / "job.json").read_text())
    job = Job(**data | {"strikes": [Strike(**s) for s in data["strikes"]]})
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    log(folder / "starts", rank, size)
    fate = Fate(folder, job.strikes, rank)
    fate.before(Workers, "broadcast_tensor", "switch")
    fate.before(os, "fsync", "files")
    fate.before(Path, "rename", "rename", lambda path, target: not Path(target).name.startswith("."))

    model = build()
    ddp = DDP(model)
    if size > 2:
        exact_(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=job.steps)
    switch = pf.Switch(rank=0.25, keep=["0"], when=pf.AtStep(job.switch_at))
    torch.manual_seed(rank)
    random.seed(rank)
    with Checkpoint(
        folder / "checkpoints", ddp, optimizer, switch=switch, scheduler=scheduler, every=job.every
    ) as checkpoint:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is reset is reported
            at = checkpoint.resume()
        if rank == 0:
            (folder / "reset.json").write_text(json.dumps(at.reset if at else []))
        for step in range(at.position["step"] if at else 0, job.steps):
            fate.step = step
            switch.step(ddp, optimizer, step=step)
            x, y = (part.chunk(size)[rank] for part in batch(step))
            loss = F.cross_entropy(ddp(x.flip(-1) if random.random() < 0.5 else x), y)
            fate.at("backward")
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log(folder / "steps", rank, step)
            fate.at("update")
            if checkpoint.step(step=step + 1) and step + 1 < job.steps:
                break
        else:
            finish(folder, rank, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"left-{rank}").touch()


def die_with_parent() -> None:
    """So that nothing runs on when the launcher, or who started it, is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def log(path: Path, rank: int, value: int) -> None:
    if rank == 0:
        with path.open("a") as file:
            file.write(f"{value}\n")


def finish(folder: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors = model.state_dict()
    for name, p in model.named_parameters():
        tensors |= {f"{name} {key}": x for key, x in optimizer.state[p].items() if isinstance(x, Tensor)}
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    model.eval()
    x, y = batch(10**6)
    end = {"digest": digest.hexdigest(), "loss": F.cross_entropy(model(x), y).item()}
    (folder / f"end-{rank}.json").write_text(json.dumps(end))


# --- the launcher ---


def launch(folder: Path, job: Job, workers: int, timeout: float = 900) -> End:
    """Run the job in `folder` under torchrun; again in the same folder it resumes."""
    prepare(folder, job)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
        f"--max-restarts={len(job.strikes)}", "--monitor-interval=0.1", __file__, "--work", str(folder),
    ]  # fmt: skip
    # torchrun keeps its store through restarts, and gloo would find the addresses of dead workers in it.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    began = time.perf_counter()
    with (folder / "output").open("ab") as output:
        run = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, start_new_session=True, preexec_fn=die_with_parent
        )
        try:
            status = run.wait(timeout)
        finally:
            if run.poll() is None:
                run.kill()  # its workers die with it
                run.wait()
    return ended(folder, status, time.perf_counter() - began)


def prepare(folder: Path, job: Job) -> None:
    """Write what workers read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    for old in folder.glob("left-*"):
        old.unlink()


def ended(folder: Path, status: int, seconds: float) -> End:
    """Read what they wrote."""
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]
    return End(
        status=status,
        seconds=seconds,
        struck=len(list(folder.glob("struck-*"))),
        starts=lines(folder / "starts"),
        steps=lines(folder / "steps"),
        left=len(list(folder.glob("left-*"))),
        digests=[end["digest"] for end in ends],
        loss=ends[0]["loss"] if ends else math.nan,
        reset=json.loads((folder / "reset.json").read_text()),
    )


def lines(path: Path) -> int:
    return len(path.read_text().split()) if path.exists() else 0


def schedule(job: Job, kills: int, workers: int, seed: int = 0) -> list[Strike]:
    """One in the switch, one or two in the writing of checkpoints, the others at random steps."""
    draw = random.Random(seed)
    writes = [step for step in range(job.steps) if (step + 1) % job.every == 0]
    strikes = [
        Strike("switch", draw.randrange(workers), job.switch_at),
        Strike("rename", 0, draw.choice(writes)),
    ]
    if kills > 3:
        strikes.append(Strike("files", draw.randrange(workers), draw.choice(writes)))
    steps = draw.sample(range(job.steps), kills - len(strikes))
    strikes += [Strike(draw.choice(["backward", "update"]), draw.randrange(workers), step) for step in steps]
    return sorted(strikes, key=lambda s: (s.step, list(POINTS).index(s.point)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], choices=[2, 3, 4])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.work)
        return 0
    if not 3 <= args.kills <= args.steps:
        parser.error(f"--kills {args.kills}: 3 at least, and no more than steps")
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, pufferfish {pf.__version__}"
    )
    job = Job(args.steps, switch_at=args.steps // 3 + 1, every=max(args.steps // 12, 2))
    print(
        f"CNN of {sum(p.numel() for p in build().parameters()):,} parameters, {job.steps} steps, "
        f"switch at {job.switch_at}, a checkpoint every {job.every}"
    )
    right = True
    with tempfile.TemporaryDirectory() as name:
        for workers in args.workers:
            folder = Path(name) / str(workers)
            whole = launch(folder / "whole", job, workers)
            print(
                f"\n{workers} workers, undisturbed: {whole.seconds:.1f} s, loss {whole.loss:.4f}, {shown(whole)}"
            )
            if whole.status:
                print((folder / "whole" / "output").read_text()[-5000:])
                return 1
            right &= killed(folder / "killed", job, workers, whole, args.kills, args.seed)
            right &= stopped(folder / "stopped", job, workers, whole)
        end = changed(Path(name) / "changed", job)
    return 0 if right and end.status == 0 and math.isfinite(end.loss) else 1


def killed(folder: Path, job: Job, workers: int, whole: End, kills: int, seed: int) -> bool:
    """Whether the job ends as `whole` did, though its workers are killed."""
    strikes = schedule(job, kills, workers, seed)
    end = launch(folder, dataclasses.replace(job, strikes=strikes), workers)
    rows = [["kill", "in step", "rank", "where"]]
    rows += [[str(i + 1), str(s.step), str(s.rank), POINTS[s.point]] for i, s in enumerate(strikes)]
    print(Table(rows, left=(3,)))
    print(
        f"{end.struck} kills, {end.starts - 1} restarts, {end.steps - job.steps} steps repeated beyond the last "
        f"checkpoint, {end.seconds:.1f} s"
    )
    return end.struck == kills and verdict(end, whole, folder)


def stopped(folder: Path, job: Job, workers: int, whole: End) -> bool:
    """Whether the job ends as `whole` did, though SIGTERM stops it just before the switch and just after it."""
    strikes = [
        Strike("update", workers - 1, job.switch_at - 2, "SIGTERM"),
        Strike("update", workers - 1, job.switch_at + 2, "SIGTERM", launcher=True),
    ]
    job = dataclasses.replace(job, strikes=strikes)
    clean = True
    for strike in strikes:
        end = launch(folder, job, workers)
        clean &= end.left == workers and (end.status == 0 or strike.launcher)
        print(
            f"SIGTERM to {'the launcher' if strike.launcher else 'one worker'} in step {strike.step}: saved after "
            f"{end.steps} steps, {end.left} workers left cleanly, torchrun's exit status {end.status}"
        )
    end = launch(folder, job, workers)
    return verdict(end, whole, folder) and clean and end.steps == job.steps


def changed(folder: Path, job: Job) -> End:
    """Another number of workers: it goes on, and says what it had to reset."""
    stops = [Strike("update", 0, job.steps * part // 4, "SIGTERM") for part in (1, 2)]
    print("\nanother number of workers after SIGTERM")
    for workers in (4, 2, 3):
        end = launch(folder, dataclasses.replace(job, strikes=stops), workers)
        print(f"{workers} workers up to step {end.steps}; reset: {'; '.join(end.reset) or 'nothing'}")
    print(f"loss {end.loss:.4f}")
    return end


def verdict(end: End, whole: End, folder: Path) -> bool:
    same = end.status == 0 and end.digests == whole.digests != []
    print(f"{'equal' if same else 'DIFFERENT'}: {shown(end)}, undisturbed {shown(whole)}")
    if end.status:
        print((folder / "output").read_text()[-5000:])
    return same


def shown(end: End) -> str:
    if len(end.digests) == 0:
        return f"no end, exit status {end.status}"
    return " ".join(digest[:12] for digest in end.digests)


if __name__ == "__main__":
    raise SystemExit(main())
