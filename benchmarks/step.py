"""What low rank buys in time: whole training steps, dense and low-rank side by side in one run.

    python benchmarks/step.py

Forward, loss, backward and an SGD step, bf16 autocast on a GPU and fp32 on a CPU. The two models take turns; medians.
Plans: ratio 0.25, ranks in multiples of 16, the reference's full-rank layers kept. On a GPU each step is timed as eager
PyTorch runs it and as one CUDA graph, where launching kernels costs nothing.

With --decay the low-rank step is timed again in a second table, with weight decay of its factors and with
`FrobeniusDecay` instead, in turns.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import REFERENCES
from pufferfish.lab.models.gpt import GPT
from pufferfish.planning.table import format_count, format_table
from pufferfish.planning.timing import capture_cuda_graph

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    keep: tuple[str, ...]


def images(batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (batch,))


def text(batch: int, time: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (batch, time + 1))
    return tokens[:, :-1], tokens[:, 1:]


def gpt(d: int, layers: int, context: int, batch: int) -> Case:
    return Case(
        f"GPT d {d}, {layers} layers, {batch}×{context}",
        lambda: GPT(vocabulary=8192, d=d, layers=layers, heads=d // 64, context=context),
        lambda: text(batch, context, 8192),
        ("blocks.0.*",),
    )


def resnet(batch: int) -> Case:
    reference = REFERENCES["resnet18"]
    return Case(f"ResNet-18 CIFAR, batch {batch}", reference.build, lambda: images(batch), reference.keep)


GPU = [resnet(512), gpt(768, 12, 1024, 32), gpt(2048, 8, 1024, 8), gpt(4096, 4, 1024, 4)]
CPU = [resnet(16), gpt(256, 4, 128, 8), gpt(512, 4, 128, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decay", action="store_true", help="show the share of FrobeniusDecay in a step")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}\n"
    )
    rows = [["step", "forward MACs", "bytes", "mode", "dense ms", "low-rank ms", ""]]
    decay_rows = [["low-rank step", "mode", "weight decay ms", "FrobeniusDecay ms", ""]]
    for case in GPU if device.type == "cuda" else CPU:
        torch.manual_seed(0)
        with device:
            models, (x, y) = [case.build() for _ in range(2)], case.batch()
        models = [m.to(memory_format=torch.channels_last) if x.dim() == 4 else m for m in models]
        plan = pf.plan(models[1], rank=0.25, keep=case.keep, example=x, measure=False)
        pf.factorize_(models[1], plan)
        before, after = plan.before, plan.after
        assert before.forward_macs is not None
        assert after.forward_macs is not None
        steps = [training_step(m, x, y) for m in models]
        for mode, runs in modes(device, steps):
            dense, low_rank = medians(device, runs)
            ratio = f"{dense / low_rank:.2f}× as fast"
            macs = f"{format_count(before.forward_macs)} → {format_count(after.forward_macs)}"
            bytes_ = f"{before.gradient_bytes / after.gradient_bytes:.2f}× fewer"
            rows.append([case.name, macs, bytes_, mode, f"{dense:.2f}", f"{low_rank:.2f}", ratio])
        del steps, runs
        if args.decay:
            decay_rows += [[case.name, *row] for row in decay_shares(device, models[1], x, y)]
        del models
    print(format_table(rows, left=(0, 1, 2, 3, 6)))
    if args.decay:
        print("\n" + format_table(decay_rows, left=(0, 1, 4)))


def decay_shares(device: torch.device, low_rank: nn.Module, x: Tensor, y: Tensor) -> list[list[str]]:
    """Time the step with weight decay of the factors and with `FrobeniusDecay`: a row for each mode."""
    rows = []
    steps = [
        training_step(copy.deepcopy(low_rank), x, y, weight_decay=1e-4, frobenius=on) for on in (False, True)
    ]
    for mode, runs in modes(device, steps):
        without, with_it = medians(device, runs)
        rows.append([mode, f"{without:.2f}", f"{with_it:.2f}", f"{with_it / without - 1:+.1%} of a step"])
    return rows


def training_step(
    model: nn.Module, x: Tensor, y: Tensor, weight_decay: float = 0.0, frobenius: bool = False
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=weight_decay)
    if frobenius:
        pf.FrobeniusDecay(model, optimizer, weight_decay)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()

    return step


def modes(device: torch.device, steps: list[Step]) -> list[tuple[str, list[Step]]]:
    if device.type == "cpu":
        return [("eager", steps)]
    return [("eager", steps), ("graph", [capture_cuda_graph(step) for step in steps])]


def medians(device: torch.device, steps: list[Step]) -> list[float]:
    """Median milliseconds of each, taking turns, after a warm-up."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(23 if device.type == "cuda" else 13):
        for step, seen in zip(steps, times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                seen.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(seen) for seen in times]


if __name__ == "__main__":
    main()
