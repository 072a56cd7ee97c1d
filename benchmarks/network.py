"""Seconds a step over slow links: ResNet-18 (CIFAR shapes) or a GPT on 4 emulated hosts, dense and low-rank, compressed or not.

    python benchmarks/network.py [--model gpt] [--links 100mbit 1gbit] [--hosts 4] [--batch 8] [--rounds 5] [--methods dense …]

Every host is a network namespace with a torchrun agent of its own and one single-threaded worker; links are shaped both ways
and measured first. All methods take turns in every round, in the same processes; medians over the rounds, and speed-ups as
medians of each round's ratios. "alone" is the same step without any exchange, so that the difference is what the network
costs. Low rank is made by a switch as in a run: the paper's hybrid of ResNet-18 at ratio 0.25; the GPT (d 384, 6 layers, 10.8 M
parameters, 128 tokens a row) at ratio 0.3125, its first block dense. "narrow" is a narrower dense model with the low-rank one's number
of parameters. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import pufferfish as pf
from pufferfish.lab.method_name import training_method
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lab.network import Network
from pufferfish.lab.train.settings import closest_width
from pufferfish.lab.train.timing import Round, TimedModel, speedups, steps_per_round, timing_rounds
from pufferfish.planning.text import Table

#: Not ours: what `bf16` has to be measured against, so that the baseline is no slower than it need be.
TORCH = "torch-bf16"
METHODS = ["dense", TORCH, "bf16", "powersgd(4)", "pufferfish", "pufferfish+bf16", "pufferfish+powersgd(4)"]
#: A narrower dense model, with the compression that follows it.
NARROW = "narrow"


@dataclass(frozen=True)
class Case:
    """A model, its batch and its optimizer."""

    build: Callable[[float], nn.Module]  # with a width
    batch: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rank: float | pf.Ratio
    keep: tuple[str, ...]

    def plan(self, model: nn.Module) -> pf.Plan:
        return pf.plan(model, rank=self.rank, keep=self.keep)

    def narrow_width(self) -> float:
        """Width of the dense model that has as many parameters as the low-rank one."""
        with torch.device("meta"):
            wanted = self.plan(self.build(1.0)).after.parameters
            return closest_width(
                lambda width: sum(p.numel() for p in self.build(width).parameters()) / wanted, tries=12
            )[0]


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


def text(rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (rows, 129))
    return tokens[:, :-1], tokens[:, 1:]


CASES = {
    "resnet18": Case(
        lambda width: REFERENCES["resnet18"].build(width=width), images,
        lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), pf.Ratio(0.25, multiple=1), REFERENCES["resnet18"].keep,
    ),
    "gpt": Case(
        lambda width: GPT(vocabulary=256, d=384, layers=6, heads=6, context=128, width=width), text,
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4), 0.3125, REFERENCES["gpt"].keep,
    ),
}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    ask.add_argument("--hosts", type=int, default=4)
    ask.add_argument("--model", choices=CASES, default="resnet18")
    ask.add_argument("--batch", type=int, default=8, help="rows of each worker")
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--methods", nargs="+", default=METHODS)
    ask.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.worker:
        work(given)
        return
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, pufferfish "
          f"{pf.__version__}, {given.model}, {given.hosts} hosts, batch {given.batch} each\n")  # fmt: skip
    for link in given.links:
        with Network(given.hosts, link) as network, tempfile.TemporaryDirectory() as folder:
            got = network.measure()
            out = Path(folder) / "times.json"
            words = ["--model", given.model, "--batch", str(given.batch), "--rounds", str(given.rounds)]
            words += ["--methods", *given.methods]
            code = network.launch([__file__, "--worker", str(out), *words], env={"OMP_NUM_THREADS": "1"})
            if code:
                raise SystemExit(f"the workers failed with exit code {code}")
            print(f"{link}: got {got.got_mbit:.0f} Mbit/s, {got.latency_ms:.2f} ms")
            print(table(json.loads(out.read_text()), given.methods), "\n", flush=True)


def work(given: argparse.Namespace) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    racing = {name: contender(name, CASES[given.model], given.batch) for name in given.methods}
    rounds = list(timing_rounds(racing, given.rounds, steps_per_round(racing)))
    if dist.get_rank() == 0:
        given.worker.write_text(json.dumps(rounds))
    del racing
    dist.barrier()
    dist.destroy_process_group()


def contender(name: str, case: Case, rows: int) -> TimedModel:
    """A model as the method trains it."""
    narrow = name.startswith(NARROW)
    plain = "dense" if name in (TORCH, NARROW) else name.removeprefix(NARROW + "+")
    chosen = training_method(plain)
    torch.manual_seed(0)
    model = case.build(case.narrow_width() if narrow else 1.0)
    low = None if chosen.model == "dense" else case.plan(model)
    x, y = case.batch(rows)
    made = TimedModel(
        chosen,
        model,
        case.optimizer,
        lambda net: nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten()),
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
    return str(Table(rows, left=(0,)))


if __name__ == "__main__":
    main()
