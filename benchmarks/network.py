"""Seconds a step over slow links: ResNet-18 (CIFAR shapes) on 4 emulated hosts, dense and low-rank, compressed or not.

    python benchmarks/network.py [--links 100mbit 1gbit] [--hosts 4] [--batch 8] [--rounds 5] [--methods dense bf16 …]

Every host is a network namespace with a torchrun agent of its own and one single-threaded worker; links are shaped both ways
and measured first. All methods take turns in every round, in the same processes; medians over the rounds, and speed-ups as
medians of each round's ratios. "alone" is the same step without any exchange, so that the difference is what the network
costs. Low rank is the paper's hybrid at ratio 0.25, made by a switch as in a run. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import pufferfish as pf
from pufferfish.lab.advise.timed_model import TimedModel
from pufferfish.lab.advise.timing_rounds import Round, speedups, steps_per_round, timing_rounds
from pufferfish.lab.models import REFERENCES
from pufferfish.lab.network import Network
from pufferfish.lab.train.training_method import training_method
from pufferfish.planning.table import format_table

#: Not ours: what `bf16` has to be measured against, so that the baseline is no slower than it need be.
TORCH = "torch-bf16"
METHODS = ["dense", TORCH, "bf16", "powersgd-4", "pufferfish", "pufferfish+bf16", "pufferfish+powersgd-4"]
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
    racing = {name: contender(name, given.batch) for name in given.methods}
    rounds = list(timing_rounds(racing, given.rounds, steps_per_round(racing)))
    if dist.get_rank() == 0:
        given.worker.write_text(json.dumps(rounds))
    del racing
    dist.barrier()
    dist.destroy_process_group()


def contender(name: str, batch: int) -> TimedModel:
    """A model as the method trains it."""
    chosen = training_method("dense" if name == TORCH else name)
    torch.manual_seed(0)
    model = RESNET.build()
    low = None if chosen.model == "dense" else pf.plan(model, rank=0.25, keep=RESNET.keep, multiple=1)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    made = TimedModel(
        chosen,
        model,
        lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        lambda net: nn.functional.cross_entropy(net(x), y),
        transform=None
        if low is None
        else lambda net, own: pf.Switch(low, when=pf.AtStep(0)).step(net, own, step=0),
    )
    if name == TORCH:
        assert made.ddp is not None
        made.ddp.register_comm_hook(None, _torch_bf16)
    return made


def _torch_bf16(_, bucket):  # type: ignore[no-untyped-def]  # DDP lets its own through only by NCCL, and looks at the name
    return bf16_compress_hook(None, bucket)


def table(rounds: list[Round], methods: list[str]) -> str:
    against = [name for name in (methods[0], "bf16") if name in methods]
    rows = [["s a step", "median", "alone", "exchange", *(f"as fast as {name}" for name in against)]]
    for name in methods:
        step, alone = (
            statistics.median(r[name][key] for r in rounds) for key in ("seconds", "compute_seconds")
        )
        faster = [f"{statistics.median(speedups(rounds, name, other)):.2f}×" for other in against]
        rows.append([name, f"{step:.3f}", f"{alone:.3f}", f"{step - alone:.3f}", *faster])
    return format_table(rows, left=(0,))


if __name__ == "__main__":
    main()
