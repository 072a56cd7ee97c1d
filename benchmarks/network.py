"""Seconds a step over slow links: ResNet-18 (CIFAR shapes) on 4 emulated hosts, dense and low-rank, compressed or not.

    python benchmarks/network.py [--links 100mbit 1gbit] [--hosts 4] [--batch 8] [--rounds 5] [--methods dense bf16 …]

Every host is a network namespace with a torchrun agent of its own and one single-threaded worker; links are shaped both ways
and measured first. All methods take turns in every round, in the same processes; medians over the rounds, and speed-ups as
medians of each round's ratios. "alone" is the same step without any exchange, so that the difference is what the network
costs. Low rank is the paper's hybrid at ratio 0.25. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.choice import choice
from pufferfish.lab.models import REFERENCES
from pufferfish.lab.network import Network
from pufferfish.table import aligned

METHODS = ["dense", "bf16", "powersgd-4", "pufferfish", "pufferfish+bf16", "pufferfish+powersgd-4"]
RESNET = REFERENCES["resnet18"]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    ask.add_argument("--hosts", type=int, default=4)
    ask.add_argument("--batch", type=int, default=8, help="images of each worker")
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--methods", nargs="+", default=METHODS)
    ask.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.worker:
        work(given)
        return
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, pufferfish "
          f"{pf.__version__}, {given.hosts} hosts, batch {given.batch} each\n")  # fmt: skip
    for link in given.links:
        with Network(given.hosts, link) as network, tempfile.TemporaryDirectory() as folder:
            got = network.measure()
            out = Path(folder) / "times.json"
            words = ["--batch", str(given.batch), "--rounds", str(given.rounds), "--methods", *given.methods]
            code = network.launch([__file__, "--worker", str(out), *words], env={"OMP_NUM_THREADS": "1"})
            if code:
                raise SystemExit(f"the workers failed with exit code {code}")
            print(f"{link}: got {got.got_mbit:.0f} Mbit/s, {got.latency_ms:.2f} ms")
            print(table(json.loads(out.read_text()), given.methods), "\n", flush=True)


def work(given: argparse.Namespace) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {name: stepper(name, given.batch) for name in given.methods}
    times: dict[str, list[float]] = {name: [] for method in steps for name in (method, f"{method}, alone")}
    for turn in range(given.rounds + 2):  # two for buckets to be rebuilt, and memory to be warm
        for method, step in steps.items():
            for name, exchange in ((method, True), (f"{method}, alone", False)):
                dist.barrier()
                begun = time.perf_counter()
                step(exchange)
                dist.barrier()
                if turn > 1:
                    times[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        given.worker.write_text(json.dumps(times))
    del steps
    dist.barrier()
    dist.destroy_process_group()


def stepper(name: str, batch: int) -> Callable[[bool], None]:
    """A step of one method, with the exchange or without."""
    chosen = choice(name)
    torch.manual_seed(0)
    model = RESNET.build()
    if chosen.model != "dense":
        pf.factorize_(model, pf.plan(model, rank=0.25, keep=RESNET.keep, multiple=1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    if chosen.compress is not None:
        pf.compress(ddp, chosen.compress, optimizer=optimizer)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    def step(exchange: bool) -> None:
        with contextlib.nullcontext() if exchange else ddp.no_sync():
            nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def table(times: dict[str, list[float]], methods: list[str]) -> str:
    rows = [["s a step", "median", "alone", "exchange", "as fast as " + methods[0]]]
    for name in methods:
        step, alone = (statistics.median(times[key]) for key in (name, f"{name}, alone"))
        ratios = [a / b for a, b in zip(times[methods[0]], times[name], strict=True)]
        rows.append(
            [name, f"{step:.3f}", f"{alone:.3f}", f"{step - alone:.3f}", f"{statistics.median(ratios):.2f}×"]
        )
    return aligned(rows, left=(0,))


if __name__ == "__main__":
    main()
