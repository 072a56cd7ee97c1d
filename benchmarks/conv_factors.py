"""Whether the 1×1 convolution of a low-rank convolution is faster as a matrix product, by layer of a CIFAR ResNet-18.

    python benchmarks/conv_factors.py [--batch 512] [--rank 0.25] [--modes eager graph compile]

Forward and backward of single 3×3 convolutions in channels-last: dense, low-rank, and low-rank with `up` computed by
`F.linear` on the image as a matrix (a view in channels-last). bf16 on a GPU, fp32 on a CPU. The three take turns;
medians. "compile" is compiled code in a CUDA graph.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import pufferfish as pf
from pufferfish.planning.table import format_table
from pufferfish.planning.timing import capture_cuda_graph

SHAPES = ((64, 32), (128, 16), (256, 8), (512, 4))  # channels, height and width


class Product(nn.Module):
    """A low-rank convolution whose second factor is a matrix product."""

    def __init__(self, layer: pf.layers.LowRankConv) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, x: Tensor) -> Tensor:
        up = self.layer.up
        rows = self.layer.down(x).permute(0, 2, 3, 1)
        return F.linear(rows, up.weight.flatten(1), up.bias).permute(0, 3, 1, 2)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--batch", type=int, default=512)
    ask.add_argument("--rank", type=float, default=0.25)
    cuda = torch.cuda.is_available()
    modes = ["eager", "graph", "compile"] if cuda else ["eager"]
    ask.add_argument("--modes", nargs="+", choices=modes, default=modes)
    a = ask.parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, batch {a.batch}, rank {a.rank}"
    )
    table = [["layer", "mode", "dense ms", "low-rank ms", "product ms", "low-rank", "product"]]
    for channels, size in SHAPES:
        torch.manual_seed(0)
        dense = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        holder = nn.Sequential(copy.deepcopy(dense))
        pf.factorize_(holder, pf.plan(holder, rank=a.rank))
        layers = [
            x.to(device, memory_format=torch.channels_last) for x in (dense, holder[0], Product(holder[0]))
        ]
        x = torch.randn(a.batch, channels, size, size, device=device).to(memory_format=torch.channels_last)
        dtype = torch.bfloat16 if cuda else torch.float32
        check(layers, x)
        for mode in a.modes:
            times = measure([step_of(layer, x.to(dtype).requires_grad_(), mode) for layer in layers])
            ratios = [f"{times[0] / time:.2f}×" for time in times[1:]]
            table.append([f"{channels} channels, {size}²", mode, *(f"{time:.3f}" for time in times), *ratios])
            print(*table[-1], flush=True)
    print("\n" + format_table(table, left=(0, 1)))


def check(layers: list[nn.Module], x: Tensor) -> None:
    """Both low-rank forms compute the same, in the same memory format."""
    two = [layer(x[:2]) for layer in layers[1:]]
    torch.testing.assert_close(two[0], two[1], rtol=1e-2, atol=1e-2)
    assert two[1].is_contiguous(memory_format=torch.channels_last)


def step_of(layer: nn.Module, x: Tensor, mode: str) -> Callable[[], None]:
    """Forward and backward, captured where the mode asks for it."""
    forward = torch.compile(layer, dynamic=False) if mode == "compile" else layer
    inputs = [x, *layer.parameters()]

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            y = forward(x)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.clear_autocast_cache()

    for _ in range(2):
        step()
    return step if mode == "eager" else capture_cuda_graph(step)


def measure(steps: list[Callable[[], None]]) -> list[float]:
    """Median milliseconds of each step, in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(3):
        for step, own in zip(steps, times, strict=True):
            timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
            own.append(1e3 * timer.blocked_autorange(min_run_time=0.05).median)
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    main()
