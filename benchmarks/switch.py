"""How long the switch takes, alone and with the SVDs shared out among processes.

    python benchmarks/switch.py [--model resnet50] [--rounds 3]

One single-threaded process against two on gloo, in turn, the same model and plan (every layer that can be, ratio
0.25). Then how evenly the SVDs' cost is shared out among 4 and 16 ranks: the most loaded rank against the fair
share, which is the mean, or the largest single SVD where that is more. Last, the peak memory (Linux) of a training step
and of the switch in one process: the switch keeps factors and moments beside the dense ones, a step gradients and
activations.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lowrank.factors import balance, svd_cost
from pufferfish.planning.text import Table

BATCH, SIZE = 8, 64  # of the step whose memory is measured


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--model", default="resnet50", choices=sorted(REFERENCES))
    ask.add_argument("--rounds", type=int, default=3)
    arguments = ask.parse_args()
    print(
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"pufferfish {pf.__version__}\n"
    )
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(arguments.rounds):
        for size, found in times.items():
            found.append(timed(arguments.model, size))
            print(f"{arguments.model}, {size} process{'es' * (size > 1)}: {found[-1]:.2f} s", flush=True)
    one, two = (statistics.median(times[size]) for size in (1, 2))
    print(f"\nmedian {one:.2f} s alone, {two:.2f} s with two: {one / two:.2f}× as fast\n")
    print(shares())
    with mp.get_context("spawn").Pool(1) as pool:
        print(f"\n{pool.apply(memory, (arguments.model,))}")


def timed(model: str, size: int) -> float:
    """Seconds of `switch.step`, of the slowest process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (size, model, folder), nprocs=size)
        return max(float(path.read_text()) for path in Path(folder).glob("seconds-*"))


def worker(rank: int, size: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    Path(folder, f"seconds-{rank}").write_text(str(switched(name)))
    dist.barrier()
    dist.destroy_process_group()


def switched(name: str) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(REFERENCES[name].build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0))
    dist.barrier()
    start = time.perf_counter()
    switch.step(model, optimizer, epoch=0)
    return time.perf_counter() - start


def memory(name: str) -> str:
    """Peaks of the resident memory in a step with AdamW and in the switch, of what is there between steps."""
    torch.manual_seed(0)
    model = REFERENCES[name].build()
    optimizer = torch.optim.AdamW(model.parameters())
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(1))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(BATCH, 3, SIZE, SIZE)).square().mean().backward()
        optimizer.step()

    switch.step(model, optimizer, epoch=0)
    step()
    optimizer.zero_grad()
    between = resident("VmRSS")
    peaks = []
    for work in (step, lambda: switch.step(model, optimizer, epoch=1)):
        optimizer.zero_grad()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        work()
        peaks.append(resident("VmHWM"))
    rows = [["", "MB", "of the memory between steps"]]
    for label, value in zip(
        ("between steps", f"a step, {BATCH} images of {SIZE}×{SIZE}", "the switch"),
        (between, *peaks),
        strict=True,
    ):
        rows.append([label, f"{value:.0f}", f"{value / between:.2f}"])
    return f"peak memory, {name}, AdamW\n{Table(rows, left=(0,))}"


def resident(key: str) -> float:
    """Memory of this process in MB: "VmRSS" now, "VmHWM" at its peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1e3


def shares() -> str:
    rows = [["the most loaded rank, of the fair share", "4 ranks", "16 ranks", "SVDs"]]
    with torch.device("meta"):
        models: dict[str, Any] = {
            "resnet50": REFERENCES["resnet50"].build(),
            "gpt": GPT(d=768, layers=12, heads=12),
        }
    for name, model in models.items():
        costs = [svd_cost(e.matrix) for e in pf.plan(model, 0.25) if e.matrix is not None and e.rank]
        row = [name]
        for workers in (4, 16):
            load = [0.0] * workers
            for owner, cost in zip(balance(costs, workers), costs, strict=True):
                load[owner] += cost
            row.append(f"{max(load) / max(sum(costs) / workers, max(costs)):.2f}")
        rows.append([*row, str(len(costs))])
    return str(Table(rows, left=(0,)))


if __name__ == "__main__":
    main()
