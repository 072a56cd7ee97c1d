"""Count the files and functions of pufferfish that three typical calls open: run `python tests/data_ways.py [-v]`.

A reader who wants to understand such a call has to open these files. See tests/test_data_ways.py for the limits.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf

ROOT = str(Path(pf.__file__).parent)

#: Files and functions by call: {"switch": [("switching/switch.py", "Switch.step"), …], …}.
Opened = dict[str, list[tuple[str, str]]]


@contextmanager
def recorded(name: str, opened: Opened) -> Iterator[None]:
    """Record the functions of pufferfish that are called in the block, in all threads."""
    calls: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls.add((code.co_filename[len(ROOT) + 1 :], code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        opened[name] = sorted(calls)


def files(calls: list[tuple[str, str]]) -> list[str]:
    return sorted({file for file, _ in calls})


def functions(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Named functions: lambdas, comprehensions and generator expressions are part of the one around them."""
    return [call for call in calls if not call[1].endswith(">")]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def factorize(opened: Opened) -> None:
    """plan → factorize_ → merge_, with the optimizer."""
    for calls in ({}, opened):  # the first time also imports modules, which is no part of the call
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        update(model, optimizer)
        with recorded("plan, factorize_, merge_", calls):
            pf.factorize_(model, pf.plan(model, rank=0.25), optimizer=optimizer)
            pf.merge_(model, optimizer=optimizer)


def switch(opened: Opened) -> None:
    """The call of `Switch.step` that switches, under DDP."""
    ddp = DDP(build())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    for epoch in range(2):
        assert not switch.step(ddp, optimizer, epoch=epoch)
        update(ddp, optimizer)
    with recorded("switch", opened):
        assert switch.step(ddp, optimizer, epoch=2)


def backward(opened: Opened) -> None:
    """One backward pass with PowerSGD, after the first ones, which set up its state."""
    ddp = DDP(build())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    pf.compress(ddp, pf.compression.PowerSGD(2), optimizer=optimizer)
    for _ in range(3):
        update(ddp, optimizer)
    loss = ddp(torch.randn(4, 64)).sum()
    with recorded("backward", opened):
        loss.backward()


def worker(rank: int, size: int, result: Any) -> None:
    """Call the distributed ones in a process group; rank 0 sends what it has recorded."""
    opened: Opened = {}
    switch(opened)
    backward(opened)
    if rank == 0:
        result.send(opened)


def _process(rank: int, store: str, result: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    worker(rank, 2, result)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the counts, and with -v all functions."""
    opened: Opened = {}
    factorize(opened)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_process, args=(r, f"{folder}/store", sender)) for r in range(2)]
        for process in workers:
            process.start()
        opened |= receiver.recv()
        for process in workers:
            process.join()
    for name, calls in opened.items():
        print(f"{name}: {len(files(calls))} files, {len(functions(calls))} functions")
        for file in files(calls):
            print(f"  {file}")
            if "-v" in sys.argv:
                print("".join(f"    {function}\n" for path, function in calls if path == file), end="")


if __name__ == "__main__":
    main()
