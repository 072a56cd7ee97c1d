"""Replicas in real processes for the tests of torchft: they train on command, and die, hang and join at given instants."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch import Tensor, nn, optim
from torchft.coordination import LighthouseServer

import pufferfish as pf
from processes import free_port
from pufferfish.compression.settings import Methods
from pufferfish.integrations.torchft import ElasticGradients, ElasticLocalSteps, Replicas

#: Seconds after which a replica that does not answer fails the test.
LIMIT = 60
H = 4


@dataclass(frozen=True)
class Job:
    """What all replicas of a job are started with."""

    kind: str = "local"  # or "gradients"
    method: Methods | None = None
    fragments: int = 1
    delay: int = 0
    momentum: float = 0.0  # of the outer optimizer
    inner: str = "SGD"
    switch_at: int | None = None
    min_replicas: int = 1
    timeout: float = 20.0
    patience: float = 60.0


@dataclass(frozen=True)
class Accident:
    """A signal that a replica sends itself before its n-th collective in a round."""

    round: int
    collective: int
    signal: int = signal.SIGKILL


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))


def batch(position: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * position + number)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def backward(model: nn.Module, position: int, number: int) -> None:
    x, y = batch(position, number)
    nn.functional.mse_loss(model(x), y).backward()


def make_inner(job: Job, model: nn.Module) -> optim.Optimizer:
    if job.inner == "AdamW":
        return optim.AdamW(model.parameters(), lr=1e-2)
    return optim.SGD(model.parameters(), lr=0.1)


def make_outer(job: Job) -> Callable[[Any], optim.Optimizer]:
    return lambda params: optim.SGD(params, lr=0.7, momentum=job.momentum, nesterov=bool(job.momentum))


class Training:
    """The training loop of one replica, in its process."""

    def __init__(self, name: str, lighthouse: str, job: Job, accident: Accident | None) -> None:
        self.job, self.number = job, ord(name) - ord("a")
        self.replicas = Replicas(
            lighthouse,
            name=name,
            min_replicas=job.min_replicas,
            timeout=job.timeout,
            patience=job.patience,
            hostname="127.0.0.1",
        )
        self.accident, self.collectives = accident, 0
        self._watch()
        self.model = build(self.number)
        self.optimizer = make_inner(job, self.model)
        self.switch = None
        if job.switch_at is not None:
            self.switch = pf.Switch(rank=12, when=pf.AtStep(job.switch_at), keep=["0", "4"])
        self.exchange: Any
        if job.kind == "gradients":
            self.exchange = ElasticGradients(self.replicas, job.method, smallest=0)
        else:
            self.exchange = ElasticLocalSteps(
                self.replicas,
                H,
                outer=make_outer(job),
                method=job.method,
                fragments=job.fragments,
                delay=job.delay,
            )

    def _watch(self) -> None:
        """Count collectives, for accidents."""
        transport, join = self.replicas.transport, self.replicas.join
        start = transport._start

        def begin() -> None:
            self.collectives = 0
            join()

        def counted(collective: Callable[[Any], Any], data: Any) -> Any:
            accident, here = self.accident, (self.replicas.round, self.collectives)
            if accident and here == (accident.round, accident.collective):
                self.accident = None
                os.kill(os.getpid(), accident.signal)
            self.collectives += 1
            return start(collective, data)

        self.replicas.join = begin  # type: ignore[method-assign]
        transport._start = counted  # type: ignore[method-assign]

    def start(self) -> None:
        self.exchange.start(self.model, self.optimizer, switch=self.switch)

    def spoil(self) -> None:
        with torch.no_grad():
            for x in self.exchange._anchor.tensors().values():
                x += 1

    def poison(self) -> None:
        """Claim to be a thousand rounds ahead, with weights that are not finite."""
        with torch.no_grad():
            for x in self.exchange._anchor.tensors().values():
                x.fill_(torch.nan)
        self.replicas.manager.load_state_dict({"step": 1000, "batches_committed": 1000})

    def until(self, position: int) -> None:
        while self.exchange.position < position:
            at = self.exchange.position
            if self.switch is not None and not self.switch.low_rank and at >= (self.job.switch_at or 0):
                if self.job.kind == "local":
                    self.exchange.sync(self.model)
                if self.switch.step(self.model, self.optimizer, step=at) and self.job.kind == "local":
                    self.exchange.start(self.model)
            backward(self.model, at, self.number)
            if self.job.kind == "gradients":
                self.exchange.average(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.job.kind == "local":
                self.exchange.step(self.model)

    def checkpoint(self, folder: Path) -> pf.Checkpoint:
        return pf.Checkpoint(folder, self.model, self.optimizer, switch=self.switch, compressor=self.exchange)

    def save(self, folder: Path) -> str:
        with self.checkpoint(folder) as checkpoint:
            return str(checkpoint.save(step=self.exchange.position))

    def resume(self, folder: Path) -> str:
        with self.checkpoint(folder) as checkpoint:
            resumed = checkpoint.resume()
        assert resumed is not None
        return str(resumed.position)

    def status(self) -> dict[str, Any]:
        local = self.exchange if isinstance(self.exchange, ElasticLocalSteps) else None
        anchor = dict(self.model.named_parameters()) if local is None else local._anchor.tensors()  # type: ignore[union-attr]
        return {
            "position": self.exchange.position,
            "round": self.replicas.round,
            "size": self.replicas.size,
            "ranks": {name: ranks[""] for name, ranks in pf.lowrank.factorize.ranks_of(self.model).items()},
            "anchor": {name: x.detach().tolist() for name, x in anchor.items()},
            "model": {name: x.tolist() for name, x in self.model.state_dict().items()},
            "optimizer": sorted({k for s in self.optimizer.state.values() for k in s}),
            "error_feedback": error_feedback(self.exchange),
        }


def error_feedback(exchange: ElasticLocalSteps | ElasticGradients) -> float:
    """Largest element of what this replica has not sent."""
    state = exchange.state_dict()
    engines = (
        [fragment["engine"] for fragment in state["fragments"]] if "fragments" in state else [state["engine"]]
    )
    return max(
        [float(x["error"].abs().max()) for e in engines for x in e["own"].values() if "error" in x],
        default=0.0,
    )


def replica(name: str, lighthouse: str, job: Job, accident: Accident | None, conn: Connection) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    try:
        training = Training(name, lighthouse, job, accident)
        conn.send("ready")
        while True:
            command, *args = conn.recv()
            result = getattr(training, command)(*args)
            conn.send(result if result is not None else training.status())
    except EOFError:
        pass
    except BaseException as error:
        conn.send(error if isinstance(error, Exception) and not error.__cause__ else RuntimeError(str(error)))
        traceback.print_exc()


class Remote:
    """A replica in a process of its own, as the test sees it."""

    def __init__(self, name: str, lighthouse: str, job: Job, accident: Accident | None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.name = name
        self.conn, theirs = context.Pipe()
        self.process = context.Process(
            target=replica, args=(name, lighthouse, job, accident, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self._ready = False

    def ready(self) -> None:
        """Wait until the Lighthouse knows it, so that others do not start without it."""
        if not self._ready:
            assert self.answer() == "ready"
            self._ready = True

    def tell(self, *command: Any) -> None:
        self.ready()
        self.conn.send(command)

    def answer(self) -> Any:
        assert self.conn.poll(LIMIT), f"replica {self.name} did not answer in {LIMIT} s"
        result = self.conn.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def dies(self) -> None:
        """Wait for its end."""
        self.process.join(LIMIT)
        assert self.process.exitcode == -signal.SIGKILL

    def hangs(self) -> None:
        """Wait until it is stopped."""
        assert self.process.pid is not None
        while True:  # the process is a child of the fork server, so there is nothing to wait for
            with open(f"/proc/{self.process.pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "T":
                    return

    def wake(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def lighthouse(port: int, min_replicas: int, conn: Connection) -> None:
    gc.freeze()
    server = LighthouseServer(
        bind=f"[::]:{port}", min_replicas=min_replicas, join_timeout_ms=30_000, heartbeat_timeout_ms=1000
    )
    conn.send(server.address())
    with suppress(EOFError):
        conn.recv()


class Cluster:
    """A Lighthouse, and replicas by name."""

    def __init__(self, job: Job, port: int) -> None:
        self.job, self.port = job, port
        self.replicas: list[Remote] = []
        self.light()

    def light(self) -> None:
        """Start the Lighthouse."""
        context = multiprocessing.get_context("forkserver")
        conn, theirs = context.Pipe()
        self.lighthouse = context.Process(
            target=lighthouse, args=(self.port, self.job.min_replicas, theirs), daemon=True
        )
        self.lighthouse.start()
        theirs.close()
        assert conn.poll(LIMIT)
        conn.recv()
        self._light = conn  # it ends when this is closed

    def darken(self) -> None:
        """Kill the Lighthouse."""
        self.lighthouse.kill()
        self.lighthouse.join()

    def add(self, name: str, accident: Accident | None = None, job: Job | None = None) -> Remote:
        """Start a replica. It joins when it is told to start."""
        remote = Remote(name, f"http://127.0.0.1:{self.port}", job or self.job, accident)
        self.replicas.append(remote)
        return remote

    def wait_for_joiner(self, count: int = 1) -> None:
        """Wait until replicas have asked the Lighthouse for a round, while the others are elsewhere."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            with urlopen(f"http://127.0.0.1:{self.port}/status", timeout=LIMIT) as page:
                if f"[{count}/{count} participants healthy]".encode() in page.read():
                    return
        raise TimeoutError("no replica joins")

    def close(self) -> None:
        for remote in self.replicas:
            remote.process.kill()
            remote.process.join()
        self.darken()


def all_do(replicas: Sequence[Remote], *command: Any) -> list[dict[str, Any]]:
    """Give replicas a command and return their answers, after checking that they share an anchor."""
    for remote in replicas:
        remote.ready()
    for remote in replicas:
        remote.tell(*command)
    found = [remote.answer() for remote in replicas]
    for status in found[1:]:
        assert status["anchor"] == found[0]["anchor"], "the replicas have different anchors"
        assert (status["position"], status["round"]) == (found[0]["position"], found[0]["round"])
    return found


def train_without(lost: Remote, others: Sequence[Remote], position: int) -> list[dict[str, Any]]:
    """Train up to the position. One replica is killed by its accident; return the answers of the others."""
    for remote in (*others, lost):
        remote.tell("until", position)
    lost.dies()
    found = [remote.answer() for remote in others]
    assert all(status["anchor"] == found[0]["anchor"] for status in found)
    return found


def join(c: Cluster, remote: Remote, others: Sequence[Remote], position: int) -> dict[str, Any]:
    """Start a replica that joins in the round that the others complete at a position; return what it then has."""
    remote.tell("start")
    c.wait_for_joiner()
    all_do(others, "until", position)
    joined: dict[str, Any] = remote.answer()
    return joined


@contextmanager
def cluster(job: Job) -> Iterator[Cluster]:
    found = Cluster(job, free_port())
    try:
        yield found
    finally:
        found.close()


def reference(job: Job, rounds: Sequence[Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Local steps of the replicas in each round, one after the other: SGD inside, SGD with Nesterov momentum outside."""
    model = build(seed)
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    v = {name: torch.zeros_like(a) for name, a in anchor.items()}
    for r, present in enumerate(rounds):
        ends = []
        for number in present:
            model.load_state_dict(anchor)
            for position in range(r * H, (r + 1) * H):
                backward(model, position, number)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad  # type: ignore[operator]
                        p.grad = None
            ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for name, a in anchor.items():
            delta = a - torch.stack([end[name] for end in ends]).mean(0)
            v[name] = job.momentum * v[name] + delta
            a -= 0.7 * (delta + job.momentum * v[name])
    return anchor


def close_to(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), x, rtol=1e-4, atol=1e-5)
