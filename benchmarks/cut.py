"""What is lost when cables are pulled: the job of faults.py with its workers on emulated hosts, each behind its own link.

    python benchmarks/cut.py [--hosts 2 3] [--network 100mbit] [--steps 60]

Cables are pulled in a backward pass, in the switch and while a checkpoint is written.

- Put back when TCP has sent something again in vain: nobody restarts.
- Left out until all workers have given up, and 45 s more: torchrun starts them again when the cable is back.
- The same without restarts: the launch fails, nothing runs on, and the same command resumes.

Each must end in the very bits of a job whose cables nobody touched: SHA-256 of parameters, buffers and optimizer state.
Exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import faults
import torch
from faults import POINTS, End, Job, Strike, verdict

import pufferfish as pf
from pufferfish.lab.network import Network, unavailable_reason
from pufferfish.planning.table import format_table

#: Seconds that workers wait for one another where a cable stays out.
SHORT = 6.0
#: Seconds that a cable stays out when they have given up. Agents that did not wait for it would have failed by then.
LINGER = 45.0


@dataclass(frozen=True)
class Cut:
    """A cable that was out."""

    strike: Strike  # where in the job; the host is the rank's
    felt: bool  # the job waited until the cable was back
    seconds: float
    steps: int  # that the job made meanwhile
    resent: int  # TCP segments that went out again meanwhile, of all hosts


class Cables(threading.Thread):
    """Pulls the cables that a job's strikes name, and puts each back when it is time."""

    def __init__(self, network: Network, folder: Path, job: Job, stay: bool) -> None:
        super().__init__(daemon=True)
        self.network, self.folder, self.job = network, folder, job
        self.stay = stay  # until all workers have given up, else until TCP has noticed
        self.said: list[str] = []  # by the job
        self.cuts: list[Cut] = []
        self._over = threading.Event()

    def run(self) -> None:
        for number, strike in enumerate(self.job.strikes):
            if not self._reached((self.folder / f"struck-{number}").exists):
                return
            before, made = resent(self.network), self._steps()
            began = time.perf_counter()
            self.network.cut(strike.rank)
            (self.folder / f"cut-{number}").touch()  # the worker goes on
            felt = self._reached(self._given_up if self.stay else lambda was=before: self._noticed(was))
            if self.stay:
                self._over.wait(LINGER)
            again, steps = resent(self.network) - before, self._steps() - made
            self.network.restore(strike.rank)
            self.cuts.append(Cut(strike, felt, time.perf_counter() - began, steps, again))

    def end(self) -> None:
        """The job is over."""
        self._over.set()
        self.join()

    def _noticed(self, before: int) -> bool:
        return resent(self.network) > before

    def _given_up(self) -> bool:
        hosts = {line.partition(" | ")[0] for line in self.said if "RuntimeError" in line}
        return len(hosts) == self.network.hosts

    def _reached(self, condition: Callable[[], bool]) -> bool:
        """Wait for it; False when the job is over before."""
        while not condition():
            if self._over.wait(0.02):
                return False
        return True

    def _steps(self) -> int:
        return faults.lines(self.folder / "steps")


def resent(network: Network) -> int:
    """TCP segments that the hosts have sent again so far."""
    found = {}
    for pid in network.process_ids():
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
            names, values = (line.split() for line in lines if line.startswith("Tcp:"))
            host = os.stat(f"/proc/{pid}/ns/net").st_ino
            found[host] = int(values[names.index("RetransSegs")])
    return sum(found.values())


def launch(
    network: Network, folder: Path, job: Job, *, stay: bool = False, restarts: int = 0
) -> tuple[End, list[Cut]]:
    """Run the job in `folder`, a worker on each host; again in the same folder it resumes."""
    faults.prepare(folder, job)
    cables = Cables(network, folder, job, stay)
    command = [faults.__file__, "--work", str(folder)]
    cables.start()
    began = time.perf_counter()
    try:
        status = network.launch(
            command, env={"OMP_NUM_THREADS": "1"}, restarts=restarts, write=cables.said.append
        )
    finally:
        seconds = time.perf_counter() - began
        cables.end()
        with (folder / "output").open("a") as output:
            output.writelines(f"{line}\n" for line in cables.said)
    return faults.ended(folder, status, seconds), cables.cuts


def schedule(job: Job, hosts: int) -> list[Strike]:
    """A cable in each place: of the last host, of the first one, where all meet, and of the last again."""
    write = job.every * (job.steps // job.every - 1) - 1
    return [
        Strike("backward", hosts - 1, job.switch_at - 3, "cut"),
        Strike("switch", 0, job.switch_at, "cut"),
        Strike("files", hosts - 1, write, "cut"),
    ]


def soon(network: Network, folder: Path, job: Job, whole: End, strikes: list[Strike]) -> bool:
    """Whether the job ends as `whole` did, and never restarts, though cables are out for a moment."""
    end, cuts = launch(network, folder, replace(job, strikes=strikes))
    rows = [["cable of", "in step", "where", "out for", "sent again", "steps meanwhile"]]
    for cut in cuts:
        at = [f"host {cut.strike.rank}", str(cut.strike.step), POINTS[cut.strike.point]]
        rows.append([*at, f"{cut.seconds:.1f} s", str(cut.resent), str(cut.steps)])
    print(format_table(rows, left=(0, 2)))
    print(f"put back soon: {end.starts - 1} restarts, {end.seconds:.1f} s")
    felt = [cut.felt and cut.steps == 0 for cut in cuts] == [True] * len(strikes)
    return verdict(end, whole, folder) and felt and end.starts == 1


def late(network: Network, folder: Path, job: Job, whole: End) -> bool:
    """Whether it does though a cable is out until long after the workers gave up, and torchrun restarts them."""
    end, cuts = launch(network, folder, _cut(job, network.hosts - 1), stay=True, restarts=1)
    seconds = cuts[0].seconds if cuts else 0.0
    print(
        f"put back after {seconds:.1f} s, long after all workers had given up: {end.starts - 1} restart, "
        f"{end.steps - job.steps} steps repeated, {end.seconds:.1f} s"
    )
    return verdict(end, whole, folder) and end.starts == 2 and [cut.felt for cut in cuts] == [True]


def again(network: Network, folder: Path, job: Job, whole: End) -> bool:
    """Whether it does though there are no restarts: the launch fails, and the same command goes on."""
    failed, _ = launch(network, folder, _cut(job, 0), stay=True)
    left = network.process_ids()
    print(f"not put back: exit status {failed.status} after {failed.steps} steps, {len(left)} processes left")
    end, _ = launch(network, folder, job)
    print(f"the same command again: {end.steps - job.steps} steps repeated")
    return verdict(end, whole, folder) and failed.status == 1 and not left and end.starts == 2


def _cut(job: Job, host: int) -> Job:
    """With a cable out between two checkpoints after the switch; nobody waits long for it."""
    step = (job.switch_at // job.every + 1) * job.every + job.every // 2
    return replace(job, timeout=SHORT, strikes=[Strike("backward", host, step, "cut")])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3], choices=[2, 3, 4])
    parser.add_argument("--network", default="100mbit", metavar="LINK")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if args.steps < 24:
        parser.error(f"--steps {args.steps}: 24 at least")
    if reason := unavailable_reason():
        sys.exit(f"no network can be emulated here: {reason}")
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, pufferfish {pf.__version__}"
    )
    job = Job(args.steps, switch_at=args.steps // 3 + 1, every=max(args.steps // 12, 4))
    right = True
    for hosts in args.hosts:
        with tempfile.TemporaryDirectory() as name, Network(hosts, args.network) as network:
            print(f"\n{hosts} hosts, {network.measure()}")
            whole, _ = launch(network, Path(name) / "whole", job)
            print(
                f"{job.steps} steps undisturbed: {whole.seconds:.1f} s, loss {whole.loss:.4f}, {faults.shown(whole)}"
            )
            right &= soon(network, Path(name) / "soon", job, whole, schedule(job, hosts))
            right &= late(network, Path(name) / "late", job, whole)
            right &= again(network, Path(name) / "again", job, whole)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
