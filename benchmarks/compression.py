"""What compressing gradients costs: encode and decode of every method, beside one copy and torch's own PowerSGD hook.

    python benchmarks/compression.py [--models resnet50 gpt] [--rounds 5] [--methods 'PowerSGD(4)' file.py:Mine]

One process, so that nothing is exchanged; a DDP model with the parameters of ResNet-50 or of a GPT (d 768, 12 layers) whose
backward pass is cheap; the time from the hook's call to its finished future. A method, one copy of the gradients and what else
it is compared with take turns, medians over the rounds.
All gradients in one bucket, for torch's PowerSGD hook runs on gloo in no other way. Passes: how many copies of the gradients
fit into the time; ratios depend on the CPU and its memory, so name both with a figure. PowerSGD's arithmetic: its five passes
over memory (add, three products, one product subtracted) as plain torch calls, with no norms, messages or checks. Then what
the parts cost beside torch's own: choosing elements beside torch.topk of the same tensors, packing signs beside one copy,
and the meter's own calls as a share of the cheapest method's hook.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from factorize import seconds
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.compression import Meter, Method
from pufferfish.compression.methods.quantized import pack, unpack
from pufferfish.lab.method_name import compression_method
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.planning.text import Table

COPY = "one copy"
TORCH = "torch's PowerSGD hook, rank 4"
TOPK = "torch.topk of the magnitudes, 1 %"
METER = "the meter's own calls"
METHODS = [
    "none", "bf16", "int8", "fp8", "int4", "int2", "loco", "sparseloco", "powersgd(4)", "alternatingpowersgd(4)",
    "topk(0.01)", "topk(0.01, sample=0.01)", "randomk(0.01)", "blockrandomk(0.01)", "dgc(0.999)", "signsgd", "efsignsgd",
    "onebitsgd", "terngrad", "qsgd",
]  # fmt: skip


class Bag(nn.Module):
    """Parameters of a model; their gradients are random numbers that stay the same."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        self.parts = nn.ParameterList(torch.zeros(p.shape, device=device) for p in model.parameters())
        self.gradients = [torch.randn(p.shape, generator=generator, device=device) for p in self.parts]

    def forward(self) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parts, self.gradients, strict=True)]).sum()


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument(
        "--models", nargs="+", default=["resnet50", "gpt"], choices=["resnet50", "gpt", "resnet18"]
    )
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--methods", nargs="+", default=METHODS, type=compression_method)
    given = ask.parse_args()
    methods = [compression_method(m) if isinstance(m, str) else m for m in given.methods]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {torch.get_num_threads()} CPU threads"
    print(f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
          f"pufferfish {pf.__version__}\n")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        dist._DEFAULT_FIRST_BUCKET_BYTES = 10**10  # type: ignore[attr-defined]
        for model in given.models:
            print(measured(model, methods, given.rounds, device), "\n", flush=True)
        dist.destroy_process_group()


def cpu_name() -> str:
    """Model of the CPU: ratios of times depend on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def measured(name: str, methods: list[Method], rounds: int, device: torch.device) -> str:
    with torch.device("meta"):
        model = GPT(d=768, layers=12, heads=12) if name == "gpt" else REFERENCES[name].build()
    bag = Bag(model, device)
    size = sum(p.numel() for p in bag.parameters())
    flat = torch.cat([g.flatten() for g in bag.gradients])
    target, packed = torch.empty_like(flat), pack(flat[: size // 8 * 8] >= 0, 1)
    large = [g.flatten() for g in bag.gradients if g.dim() > 1]
    parts: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(flat),
        "the passes of PowerSGD's arithmetic, rank 4": plain_powersgd(bag.gradients, rank=4),
        TOPK: lambda: [g.abs().topk(max(1, len(g) // 100)) for g in large],
        "signs packed": lambda: pack(flat[: size // 8 * 8] >= 0, 1),
        "signs unpacked": lambda: unpack(packed, 1),
        METER: metered,
    }
    works = {what: (lambda work=work: seconds(device, work)) for what, work in parts.items()}
    works[TORCH] = hooked(bag, None, device)
    medians = in_turns(works, rounds)
    rows = [[f"{name}, {size:,} parameters", "ms", "passes"]]
    rows += [[what, f"{1e3 * t:.2f}", f"{t / medians[COPY]:.1f}"] for what, t in medians.items()]
    text = [
        f"{what}: {medians[what] / medians[COPY]:.2f}× the time of one copy"
        for what in medians
        if "signs" in what
    ]
    cheapest, least = "", float("inf")
    for method in methods:  # one at a time: each keeps copies of all gradients
        what = repr(method)
        beside = {"PowerSGD": TORCH, "TopK": TOPK}.get(type(method).__name__, COPY)
        turns = in_turns(
            {what: hooked(bag, method, device), COPY: works[COPY], beside: works[beside]}, rounds
        )
        rows.append([what, f"{1e3 * turns[what]:.2f}", f"{turns[what] / turns[COPY]:.1f}"])
        if beside != COPY:
            text.append(f"{what} takes {turns[what] / turns[beside]:.2f}× the time of {beside}")
        cheapest, least = min((cheapest, least), (what, turns[what]), key=lambda pair: pair[1])
    share = 100 * medians[METER] / least
    text.append(f"metering is {share:.2f} % of {cheapest}'s hook, which is a part of a training step")
    return "\n".join([str(Table(rows, left=(0,))), "", *text])


def in_turns(works: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after three rounds: torch's hook compresses from its third step on."""
    times = [{what: work() for what, work in works.items()} for _ in range(rounds + 3)]
    return {what: statistics.median(turn[what] for turn in times[3:]) for what in works}


def plain_powersgd(gradients: list[Tensor], rank: int) -> Callable[[], object]:
    """PowerSGD's passes over memory for all matrices, with factors that stay the same."""
    Gs = [g.flatten(1) for g in gradients if g.dim() > 1]
    places = [[torch.zeros_like(G) for _ in range(3)] for G in Gs]
    factors = [(G.new_ones(len(G), rank), G.new_ones(rank, G.shape[1])) for G in Gs]

    def passes() -> None:
        for G, (error, M, mean), (P, Q) in zip(Gs, places, factors, strict=True):
            torch.add(G, error, out=M)
            torch.mm(Q, M.T)
            M.addmm_(P, torch.mm(P.T, M), alpha=-1)
            torch.mm(P, Q, out=mean)

    return passes


def metered() -> None:
    """What the meter does in a step of two rounds."""
    meter = Meter()
    with meter.working():
        for _ in range(2):
            meter.sent("all_reduce", 100, 2)
            with meter.waiting():
                pass
    meter.step(100, 2)


def hooked(bag: Bag, method: Method | None, device: torch.device) -> Callable[[], float]:
    """A backward pass through a DDP of its own; gives the seconds spent in its hook. No method: torch's PowerSGD."""
    ddp = DistributedDataParallel(bag, bucket_cap_mb=10**5)
    spent: list[float] = []
    if method is None:
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        inside: Callable[[Any], Any] = lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket)  # noqa: E731
    else:
        scratch = DistributedDataParallel(bag, bucket_cap_mb=10**5)
        inside = pf.compress(scratch, method).take

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are strings
        done: list[Any] = []
        spent.append(seconds(device, lambda: done.append(inside(bucket)) or done[0].wait()))
        return done[0]

    ddp.register_comm_hook(None, hook)

    def step() -> float:
        for p in bag.parameters():
            p.grad = None
        ddp().backward()
        return spent.pop()

    return step


if __name__ == "__main__":
    main()
