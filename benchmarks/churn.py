"""What is lost when replicas come and go: 4 replicas on emulated hosts, killed, stopped and started again at random instants.

    python benchmarks/churn.py --text enwik8.gz [--networks 20mbit 100mbit] [--methods streaming …] [--kills 32] [--out FILE]
    python benchmarks/churn.py --text FILE --short      # about a minute
    python benchmarks/churn.py --table FILE...

A small GPT learns bytes of a real text (`--text`: the first 4 MB; validation: the last 64 KB) by `ElasticLocalSteps`, with a switch
to low rank in the middle. Every replica is a process on a host of its own behind a shaped link, and a Lighthouse runs on a fifth host.
For each network and method, the job runs undisturbed with each seed, and once more, with the first seed, through accidents:

- kills: SIGKILL to a replica at a random instant, or once it is in the switch, has an average in flight, or is joining. Every kill is counted
  where it hit. The replica is started again after up to two seconds.
- stops: SIGSTOP, and SIGCONT many seconds later: a replica that hangs and comes back.
- The Lighthouse is killed once, and started again.

At least two other replicas are always left. The job goes on with three (`min_replicas`); with two it waits for a third.

Printed: kills, rounds, updates that were made and lost, the longest pauses between two updates of a replica that was itself left alone, and
the final validation loss. The digests of the anchors of all replicas are compared after each round. Exit status 1 if the job stops, a kill is missing, anchors differ, or
the loss is further from that of the same seed than seeds differ, and more than 1 % (5 % with one seed, which does not show how far
seeds differ). Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.integrations.torchft import ElasticLocalSteps, Replicas
from pufferfish.integrations.torchft.replicas import digest
from pufferfish.lab.method_name import training_method
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lab.network import Network, unavailable_reason
from pufferfish.planning.text import Table

REPLICAS, MIN_REPLICAS, PORT = 4, 3, 29510
CONTEXT, BATCH, VALIDATION = 64, 8, 2**16
METHODS = {
    "plain": "diloco(20)",
    "streaming": "streaming(20,fragments=4,delay=4)",
    "sparseloco": "sparseloco(20)",
    "sparseloco+checkpoints": "sparseloco(20)",  # each replica saves its state after every round
}
#: Where a kill can hit.
PHASES = ("training", "exchange", "flight", "switch", "joining")
#: Why a replica that is left alone pauses: too few others; no Lighthouse; somebody was lost, hangs or joins.
PAUSES = ("with two left", "without Lighthouse", "otherwise")
#: Seconds: a replica that is silent for so long counts as lost; the job has stopped if nothing happens for so long.
TIMEOUT, STALLED = 15.0, 240.0


@dataclass(frozen=True)
class Job:
    """What all replicas are started with."""

    method: str  # of METHODS
    updates: int
    seed: int = 0
    lr: float = 3e-3

    @property
    def h(self) -> int:
        local = training_method(METHODS[self.method]).local
        assert local is not None
        return local.h

    @property
    def switch_at(self) -> int:
        return self.updates // 2

    @property
    def last(self) -> int:
        """Position at which all replicas must be there again: one that missed the end would wait for others."""
        return self.updates - 3 * self.h


# --- a replica ---


class Observed(ElasticLocalSteps):
    """Local steps that write down, for whoever kills them, where they are and what they have."""

    def __init__(self, folder: Path, number: int, replicas: Replicas, job: Job) -> None:
        local = training_method(METHODS[job.method]).local
        assert local is not None
        super().__init__(
            replicas,
            local.h,
            outer=local.outer,
            method=local.compress,
            fragments=local.fragments,
            delay=local.delay,
        )
        self.special, self.made = "joining", 0
        self._status = os.open(folder / f"status-{number}", os.O_WRONLY)
        self._lines = os.open(folder / f"lines-{number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._stepped_at = time.monotonic()

    def note(self, otherwise: str = "training") -> None:
        """Write the phase, in one call, so that SIGKILL leaves a whole line."""
        flying = self._flying[1].since if self._flying is not None else []
        phase = self.special or ("flight" if flying else otherwise)
        line = f"{phase:10}{self.position:8}{max([self.updates, *flying]):8}{self.made:8}\n"
        os.pwrite(self._status, line.encode(), 0)

    def write(self, **line: Any) -> None:
        os.write(self._lines, (json.dumps({"time": time.monotonic(), **line}) + "\n").encode())

    def step(self, model: nn.Module) -> bool:
        self.made += 1
        averaged, now = super().step(model), time.monotonic()
        if now - self._stepped_at > 1:
            self.write(pause=now - self._stepped_at)
        self._stepped_at = now
        self.note()
        return averaged

    def wait_for(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.02)
        self._stepped_at = time.monotonic()

    def _round(self, due: list[int]) -> None:
        self.note("exchange")
        super()._round(due)
        self.note()

    def _finish(self, *args: Any, **kwargs: Any) -> bool:
        done = super()._finish(*args, **kwargs)
        if done:
            assert self._anchor is not None
            self.write(
                round=self._replicas.round,
                digest=digest(self._anchor.tensors()).hex(),
                size=self._replicas.size,
            )
            self.special = "" if self.special == "joining" else self.special
        return done

    def _adopt(self, state: Any) -> None:
        before = self.updates
        super()._adopt(state)
        self.write(lost=before - self.updates)


def work(folder: Path, number: int, lighthouse: str, address: str) -> None:
    """One replica's life."""
    torch.set_num_threads(1)
    job = Job(**json.loads((folder / "job.json").read_text()))
    text = torch.frombuffer(bytearray((folder / "text").read_bytes()), dtype=torch.uint8)
    replicas = Replicas(
        lighthouse,
        name=str(number),
        min_replicas=MIN_REPLICAS,
        timeout=TIMEOUT,
        patience=STALLED,
        hostname=address,
    )
    torch.manual_seed(job.seed)
    model = GPT(vocabulary=256, d=64, layers=4, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95))
    switch = pf.Switch(rank=0.25, keep=REFERENCES["gpt"].keep, when=pf.AtStep(job.switch_at))
    local = Observed(folder, number, replicas, job)
    local.note()
    saved = pf.Checkpoint(
        folder / f"checkpoint-{number}", model, optimizer, switch=switch, compressor=local,
        every=job.h if job.method.endswith("+checkpoints") else None,
    )  # fmt: skip
    local.wait_for(folder / "begin")
    saved.resume()
    local.start(model, optimizer, switch=switch)
    while local.position < job.updates:
        at = local.position
        if at >= job.last:
            local.wait_for(folder / "end")
        if at >= job.switch_at and not switch.low_rank:
            local.special = "switch"
            local.sync(model)
            if switch.step(model, optimizer, step=at):
                local.start(model)
            local.special = ""
        for group in optimizer.param_groups:
            group["lr"] = (
                job.lr * min((at + 1) / 40, 1.0) * (0.55 + 0.45 * math.cos(math.pi * at / job.updates))
            )
        loss(model, batch(text[:-VALIDATION], (job.seed * 10**6 + at) * REPLICAS + number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        local.step(model)
        saved.step(step=local.position)
    local.sync(model)
    local.write(end=digest(dict(model.named_parameters())).hex(), loss=validate(model, text[-VALIDATION:]),
                position=local.position, low_rank=bool(switch.low_rank))  # fmt: skip
    replicas.shutdown()


def batch(text: Tensor, seed: int) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, text: Tensor) -> float:
    """Bits per byte."""
    model.eval()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
    sums = [loss(model, part).item() * len(part) for part in windows.split(64)]
    return sum(sums) / len(windows) / math.log(2)


# --- who starts and kills them ---


@dataclass
class Accident:
    """A signal to a replica, or to the Lighthouse."""

    position: int  # of the job, from which on it is due
    kind: str  # "kill", "stop" or "lighthouse"
    seconds: float  # until the victim is started, or continued
    phase: str = ""  # wait until a replica is in it
    delay: float = 0.0  # seconds from then on
    draw: float = 0.0  # decides about the victim
    victim: Host | None = None
    at: float = 0.0  # instant, once it has a victim


@dataclass
class Result:
    """What became of one run."""

    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    stops: int = 0
    lighthouse: int = 0
    errors: list[str] = field(default_factory=list)  # last lines of replicas that ended on their own
    made: int = 0
    lost: int = 0  # updates made and never averaged
    rounds: int = 0
    compared: int = 0  # rounds whose anchors two or more replicas have written
    different: int = 0
    pauses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSES, 0.0))  # the longest ones
    loss: float = math.nan
    replicas: int = 0  # that have reached the end together


class Host:
    """A replica and its host, as the supervisor sees it."""

    def __init__(self, network: Network, number: int, folder: Path) -> None:
        self.network, self.number, self.folder = network, number, folder
        self.status = folder / f"status-{number}"
        self.process: subprocess.Popen[str] | None = None
        self.again = 0.0  # when to start or continue it
        self.stopped = False
        self.away: list[list[float]] = []  # when it was stopped: from, until

    def start(self) -> None:
        self.status.write_text(f"{'starting':10}{0:8}{0:8}{0:8}\n")
        there = self.network.address
        command = [sys.executable, __file__, "--work", str(self.folder), str(self.number),
                   f"http://{there(REPLICAS)}:{PORT}", there(self.number)]  # fmt: skip
        with (self.folder / f"output-{self.number}").open("a") as output:
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.network.interface}
            self.process = self.network.run(self.number, command, env, stdout=output, stderr=output)

    def read(self) -> tuple[str, int, int, int]:
        """Phase, position, updates since the last average, and updates of this process."""
        phase, *numbers = self.status.read_text().split()
        return phase, *map(int, numbers)  # type: ignore[return-value]

    @property
    def running(self) -> bool:
        return self.process is not None and not self.stopped

    @property
    def settled(self) -> bool:
        return self.running and self.read()[0] in ("training", "exchange", "flight", "switch")

    def lines(self) -> list[dict[str, Any]]:
        file = self.folder / f"lines-{self.number}"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Supervisor:
    """Runs one job on the network, and its accidents."""

    def __init__(
        self, network: Network, folder: Path, job: Job, text: bytes, accidents: list[Accident]
    ) -> None:
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        (folder / "text").write_bytes(text)
        self.network, self.folder, self.job = network, folder, job
        self.accidents, self.result = list(accidents), Result()
        self.hosts = [Host(network, number, folder) for number in range(REPLICAS)]
        self.ended: list[Host] = []
        self.lighthouse: subprocess.Popen[str] | None = None
        self.light_at = 0.0
        self.dark: list[list[float]] = []  # when there was no Lighthouse: from, until
        self.few: list[list[float]] = []  # when there were fewer than MIN_REPLICAS replicas

    def run(self) -> Result:
        began = moved = time.monotonic()
        position = 0
        self.light()
        for host in self.hosts:
            host.start()
        while len(self.ended) < REPLICAS:
            time.sleep(0.02)
            now = time.monotonic()
            self.look_after(now)
            self.count_settled(now)
            if (found := max(host.read()[1] for host in self.hosts)) > position:
                position, moved = found, now
            if now - moved > STALLED:
                self.result.errors.append(f"the job has stopped at update {position} for {STALLED:g} s")
                break
            self.strike(position, now)
            self.let_pass(position)
        self.result.seconds = time.monotonic() - began
        self.network.stop()
        self.read_lines()
        return self.result

    def light(self) -> None:
        """Start the Lighthouse."""
        command = [str(Path(sys.executable).parent / "torchft_lighthouse"), "--bind", f"[::]:{PORT}", "--min_replicas",
                   str(MIN_REPLICAS), "--join_timeout_ms", "60000", "--heartbeat_timeout_ms", "2000"]  # fmt: skip
        with (self.folder / "output-lighthouse").open("a") as output:
            self.lighthouse = self.network.run(REPLICAS, command, stdout=output, stderr=output)

    def look_after(self, now: float) -> None:
        """Start what is due, and see who has ended."""
        if self.lighthouse is None and now >= self.light_at:
            self.light()
            self.dark[-1][1] = now + 2  # until the replicas have found it
        for host in self.hosts:
            if host.process is None:
                if host not in self.ended and now >= host.again:
                    host.start()
            elif host.stopped:
                if now >= host.again:
                    host.process.send_signal(signal.SIGCONT)
                    host.stopped = False
                    host.away[-1][1] = now
            elif (status := host.process.poll()) is not None:
                host.process = None
                self.result.made += host.read()[3]
                if status == 0:
                    self.ended.append(host)
                else:
                    last = (self.folder / f"output-{host.number}").read_text().strip().splitlines()[-1:]
                    self.result.errors.append(f"replica {host.number} has ended with status {status}: {last}")
                    host.again = now + 1

    def count_settled(self, now: float) -> None:
        few = sum(host.settled for host in self.hosts) < MIN_REPLICAS
        if few and not (self.few and self.few[-1][1] == math.inf):
            self.few.append([now, math.inf])
        elif not few and self.few and self.few[-1][1] == math.inf:
            self.few[-1][1] = now

    def strike(self, position: int, now: float) -> None:
        """Give due accidents a victim, and let those happen whose instant has come."""
        for accident in [a for a in self.accidents if position >= a.position]:
            if accident.kind == "lighthouse":
                assert self.lighthouse is not None
                self.lighthouse.kill()
                self.lighthouse.wait()
                self.lighthouse, self.light_at = None, now + accident.seconds
                self.dark.append([now, math.inf])
                self.result.lighthouse += 1
                self.accidents.remove(accident)
            elif accident.victim is None:
                if accident.phase == "switch" and position > self.job.switch_at + self.job.h:
                    accident.phase = ""  # it is over, so the kill hits elsewhere
                taken = [other.victim for other in self.accidents]
                some = [h for h in self.hosts if h.running and h not in taken and self.fits(h, accident)]
                if some:
                    accident.victim = some[int(accident.draw * len(some))]
                    accident.at = now + accident.delay
            elif now >= accident.at:
                victim, accident.victim = accident.victim, None
                if victim.running and victim.read()[0] != "starting" and self.others(victim) >= 2:
                    self.hit(victim, accident, now)
                    self.accidents.remove(accident)

    def fits(self, host: Host, accident: Accident) -> bool:
        phase = host.read()[0]
        return phase != "starting" and accident.phase in ("", phase) and self.others(host) >= 2

    def others(self, host: Host) -> int:
        return sum(other.settled for other in self.hosts if other is not host)

    def hit(self, victim: Host, accident: Accident, now: float) -> None:
        assert victim.process is not None
        victim.again = now + accident.seconds
        if accident.kind == "stop":
            victim.process.send_signal(signal.SIGSTOP)
            victim.stopped = True
            victim.away.append([now, math.inf])
            self.result.stops += 1
            return
        victim.process.kill()
        victim.process.wait()
        phase, _, since, made = victim.read()
        self.result.kills[phase] += 1
        self.result.made += made
        self.result.lost += since
        victim.process = None

    def let_pass(self, position: int) -> None:
        """Let the job begin with all replicas, and end once all accidents have happened and all replicas are there."""
        begin, end = self.folder / "begin", self.folder / "end"
        waiting = begin if not begin.exists() else end
        if waiting is end and (position < self.job.last or end.exists()):
            return
        for accident in self.accidents if waiting is end else ():
            accident.phase = ""  # all wait here, and nothing is in flight any more
        started = all(host.running and host.read()[0] != "starting" for host in self.hosts)
        if started and (waiting is begin or not self.accidents) and self.lighthouse is not None:
            waiting.touch()

    def read_lines(self) -> None:
        """What the replicas have written."""
        anchors: dict[int, list[str]] = {}
        ends = []
        for host in self.hosts:
            for line in host.lines():
                self.result.lost += line.get("lost", 0)
                if "round" in line:
                    anchors.setdefault(line["round"], []).append(line["digest"])
                if "pause" in line:
                    self.count_pause(host, line["time"] - line["pause"], line["time"])
                if "end" in line:
                    ends.append(line)
        self.result.rounds = len(anchors)
        self.result.compared = sum(len(found) > 1 for found in anchors.values())
        self.result.different = sum(len(set(found)) > 1 for found in anchors.values())
        if (
            len({(end["end"], end["loss"], end["position"], end["low_rank"]) for end in ends}) == 1
            and ends[0]["low_rank"]
        ):
            self.result.replicas, self.result.loss = len(ends), ends[0]["loss"]

    def count_pause(self, host: Host, begin: float, end: float) -> None:
        def meets(times: list[list[float]]) -> bool:
            return any(begin < until and end > since for since, until in times)

        if not meets(host.away):  # else it was stopped itself
            few, dark, other = PAUSES
            why = few if meets(self.few) else dark if meets(self.dark) else other
            self.result.pauses[why] = max(self.result.pauses[why], end - begin)


def schedule(job: Job, kills: int, stops: int, lighthouse: bool, seed: int) -> list[Accident]:
    """Two kills in the switch, a fifth each in a flight and of joining replicas, the others anywhere; drawn from a seed."""
    draw = random.Random(seed)
    fifth = kills // 5
    targets = ["switch"] * min(2, kills) + ["joining"] * fifth
    targets += ["flight"] * (fifth if job.method == "streaming" else 0)
    near = range(job.switch_at - 2 * job.h, job.switch_at + job.h)  # somebody must be left for the switch

    def instant() -> int:
        while True:
            position = draw.randrange(job.h, job.last - job.h)
            if position not in near:
                return position

    found = []
    for phase in [*targets, *[""] * (kills - len(targets))]:
        position = job.switch_at - 1 if phase == "switch" else instant()
        delay = draw.uniform(0, 0.2 if phase in ("flight", "switch") else 1.0)
        found.append(Accident(position, "kill", draw.uniform(0, 2), phase, delay, draw.random()))
    for _ in range(stops):
        found.append(Accident(instant(), "stop", draw.uniform(5, 25), "", draw.uniform(0, 1), draw.random()))
    if lighthouse:
        found.append(Accident(instant(), "lighthouse", draw.uniform(1, 3)))
    return sorted(found, key=lambda accident: accident.position)


# --- the command ---


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--text", type=Path, help="enwik8 or another text, maybe with gzip")
    ask.add_argument("--networks", nargs="+", default=["20mbit", "100mbit"], metavar="LINK")
    ask.add_argument("--methods", nargs="+", default=["streaming"], choices=METHODS)
    ask.add_argument("--updates", type=int, default=600, help="of each replica")
    ask.add_argument("--kills", type=int, default=32)
    ask.add_argument("--stops", type=int, default=4)
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of undisturbed runs")
    ask.add_argument("--accidents", type=int, default=0, help="seed of the accidents")
    ask.add_argument("--short", action="store_true", help="one network, few updates, 6 kills")
    ask.add_argument("--out", type=Path, help="append results to this file")
    ask.add_argument("--table", type=Path, nargs="+", help="show results")
    ask.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.work:
        folder, number, *addresses = given.work
        work(Path(folder), int(number), *addresses)
        return 0
    if given.table:
        print(table(read_results(given.table)))
        return 0
    if given.text is None:
        ask.error("--text is needed")
    if reason := unavailable_reason():
        sys.exit(f"no network can be emulated here: {reason}")
    if given.short:
        given.networks, given.updates, given.kills, given.stops, given.seeds = ["100mbit"], 240, 6, 1, [0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as ctrl-C: the network is removed
    text = read_text(given.text)
    settings = {
        "benchmark": "churn", "text": given.text.name, "updates": given.updates, "kills": given.kills,
        "stops": given.stops, "accidents": given.accidents,
        "cpus": os.cpu_count(), "torch": torch.__version__, "pufferfish": pf.__version__,
    }  # fmt: skip
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
          f"torch {torch.__version__}, pufferfish {pf.__version__}")  # fmt: skip
    right, lines = True, []
    for network in given.networks:
        for method in given.methods:
            found = compare(network, method, given, text, settings)
            right &= verdict(found, given.kills)
            lines += found
    print("\n" + table(lines))
    return 0 if right else 1


def read_text(path: Path) -> bytes:
    """The first 4 MB, and the last 64 KB for validation."""
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return data[: min(4_000_000, len(data) - VALIDATION)] + data[-VALIDATION:]


def compare(
    link: str, method: str, given: argparse.Namespace, text: bytes, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """The undisturbed runs, and the one with accidents; those in --out already are not run again."""
    lines = []
    earlier = read_results([given.out]) if given.out and given.out.exists() else []
    for seed, disturbed in [*((seed, False) for seed in given.seeds), (given.seeds[0], True)]:
        about = {
            "network": link,
            "method": method,
            "seed": seed,
            "disturbed": disturbed,
            "settings": settings,
        }
        line = next((line for line in earlier if about.items() <= line.items()), None)
        if line is None:
            job = Job(method, given.updates, seed)
            accidents = schedule(job, given.kills, given.stops, True, given.accidents) if disturbed else []
            with Network(REPLICAS + 1, link) as network, tempfile.TemporaryDirectory() as folder:
                result = Supervisor(network, Path(folder) / "job", job, text, accidents).run()
            line = {**about, **asdict(result)}
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        lines.append(line)
        print(*line["errors"], sep="\n", end="\n" if line["errors"] else "")
        print(f"{name(line)}, seed {seed}: {line['seconds']:.0f} s, {line['rounds']} rounds, {sum(line['kills'].values())} kills, "
              f"loss {line['loss']:.4f}", flush=True)  # fmt: skip
    return lines


def read_results(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def name(line: dict[str, Any]) -> str:
    return f"{line['network']}, {line['method']}{', accidents' if line['disturbed'] else ''}"


def verdict(lines: list[dict[str, Any]], kills: int) -> bool:
    """Whether all held that must hold, of one network and method."""
    *calm, churn = lines
    losses = [line["loss"] for line in calm]
    gap, noise = abs(churn["loss"] - losses[0]), max(losses) - min(losses)
    same = all(
        line["replicas"] == REPLICAS and not line["different"] and not line["errors"] for line in lines
    )
    allowed = max(noise, (0.01 if len(losses) > 1 else 0.05) * losses[0])
    right = same and sum(churn["kills"].values()) == kills and gap <= allowed
    print(f"{'held' if right else 'DID NOT HOLD'}: {churn['compared']} rounds compared, {churn['different']} with different anchors; "
          f"loss {churn['loss'] - losses[0]:+.4f} bits per byte, seeds differ by {noise:.4f}")  # fmt: skip
    return right


def table(lines: list[dict[str, Any]]) -> str:
    rows = [["", "seed", "kills", *PHASES, "stops", "rounds", "anchors differ", "updates", "lost",
             "time", "bits per byte", *(f"pause {why}" for why in PAUSES)]]  # fmt: skip
    for line in lines:
        kills = line["kills"]
        rows.append([
            name(line), str(line["seed"]), str(sum(kills.values())), *(str(kills[phase]) for phase in PHASES),
            str(line["stops"]), str(line["rounds"]), str(line["different"]), f"{line['made']:,}", f"{line['lost']:,}",
            f"{line['seconds']:.0f} s", f"{line['loss']:.4f}", *(f"{line['pauses'][why]:.1f} s" for why in PAUSES),
        ])  # fmt: skip
    return str(Table(rows, left=(0,)))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        sys.exit(130)
