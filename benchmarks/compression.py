"""What compressing gradients costs: encode and decode of every method, beside one copy and torch's own PowerSGD hook.

    python benchmarks/compression.py [--models resnet50 gpt] [--rounds 5] [--methods PowerSGD TopK]

One process, so that nothing is exchanged; a DDP model with the parameters of ResNet-50 or of a GPT (d 768, 12 layers) whose
backward pass is cheap; the time from the hook's call to its finished future. Methods take turns, medians over the rounds.
All gradients in one bucket, for torch's PowerSGD hook runs on gloo in no other way. Passes: how many copies of the gradients
fit into the time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from factorize import seconds
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.table import aligned

TORCH = "torch's PowerSGD hook, rank 4"
METHODS: dict[str, Any] = {
    type(method).__name__: method
    for method in (
        pf.NoCompression(), pf.BFloat16(), pf.BlockInt8(), pf.BlockFP8(), pf.PowerSGD(4), pf.AlternatingPowerSGD(4),
        pf.TopK(0.01), pf.RandomK(0.01), pf.BlockRandomK(0.01), pf.DGC(0.999), pf.SignSGD(), pf.EFSignSGD(),
        pf.OneBitSGD(), pf.TernGrad(), pf.QSGD(),
    )
}  # fmt: skip


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
    ask.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    given = ask.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
          f"pufferfish {pf.__version__}\n")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        dist._DEFAULT_FIRST_BUCKET_BYTES = 10**10  # type: ignore[attr-defined]
        for model in given.models:
            print(measured(model, [*given.methods, TORCH], given.rounds, device), "\n", flush=True)
        dist.destroy_process_group()


def measured(name: str, methods: list[str], rounds: int, device: torch.device) -> str:
    with torch.device("meta"):
        model = GPT(d=768, layers=12, heads=12) if name == "gpt" else REFERENCES[name].build()
    bag = Bag(model, device)
    size = sum(p.numel() for p in bag.parameters())
    steps = {method: hooked(bag, method, device) for method in methods}
    times: dict[str, list[float]] = {"one copy": [], **{method: [] for method in methods}}
    flat = torch.cat([g.flatten() for g in bag.gradients])
    target = torch.empty_like(flat)
    for _ in range(rounds + 3):  # torch's hook compresses from its third step on
        times["one copy"].append(seconds(device, lambda: target.copy_(flat)))
        for method, step in steps.items():
            times[method].append(step())
    medians = {method: statistics.median(found[3:]) for method, found in times.items()}
    rows = [[f"{name}, {size:,} parameters", "ms", "passes"]]
    rows += [[m, f"{1e3 * t:.1f}", f"{t / medians['one copy']:.1f}"] for m, t in medians.items()]
    text = aligned(rows, left=(0,))
    if "PowerSGD" in medians:
        text += f"\nour PowerSGD takes {medians['PowerSGD'] / medians[TORCH]:.2f}× the time of torch's hook"
    return text


def hooked(bag: Bag, method: str, device: torch.device) -> Callable[[], float]:
    """A backward pass through a DDP of its own; gives the seconds spent in its hook."""
    ddp = DistributedDataParallel(bag, bucket_cap_mb=10**5)
    spent: list[float] = []
    if method == TORCH:
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        inside: Callable[[Any], Any] = lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket)  # noqa: E731
    else:
        scratch = DistributedDataParallel(bag, bucket_cap_mb=10**5)
        inside = pf.compress(scratch, METHODS[method]).take

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
