"""How long the SVDs of a whole model take, and how much memory they need.

    python benchmarks/factorize.py                  ResNet-50, every eligible layer at ratio 0.25
    python benchmarks/factorize.py --billion        a Transformer of a billion parameters (a GPU of 16 GB or more)

ResNet-50 is factorized by `factorize_` and, in the same run, layer by layer through `torch.linalg.svd` in
fp32 on the same matrices. Limits: 10 s on two cores, 1.5 s on an H200; three copies of the largest layer.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

import pufferfish as pf
from pufferfish.lab.models import REFERENCES
from pufferfish.lab.models.gpt import GPT


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--billion", action="store_true")
    arguments = ask.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}\n"
    )
    resnet50(device)
    if arguments.billion:
        billion(device)


def resnet50(device: torch.device) -> None:
    torch.manual_seed(0)
    model = REFERENCES["resnet50"].build().to(device)
    plan = pf.plan(model, rank=0.25, multiple=1)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    ours, plain = [], []
    for _ in range(4):  # the first warms up
        pf.merge_(model)
        model.load_state_dict(state)
        weights = [
            (e.matrix.to_matrix(model.get_submodule(e.layer).get_parameter("weight").detach())[0], e.rank)
            for e in plan
            if e.matrix is not None and e.rank is not None
        ]
        plain.append(seconds(device, lambda weights=weights: [lapack(W, r) for W, r in weights]))
        ours.append(seconds(device, lambda: pf.factorize_(model, plan)))
    mine, theirs = statistics.median(ours[1:]), statistics.median(plain[1:])
    print(
        f"ResNet-50, {len(plan.ranks)} layers, {plan.before.parameters:,} → {plan.after.parameters:,} parameters"
    )
    print(f"  factorize_          {mine:8.3f} s   (median of {len(ours) - 1})")
    print(f"  torch.linalg.svd    {theirs:8.3f} s   {theirs / mine:.2f}× as long")
    flops = sum(products(e.matrix, e.rank) for e in plan if e.matrix is not None and e.rank is not None)
    floor = flops / fp64_rate(device)
    print(f"  the products alone  {floor:8.3f} s   {flops / 1e9:.1f} GFLOP at this device's fp64 rate\n")


def products(x: pf.layers.Matrix, r: int) -> int:
    """FLOPs of the Gram matrix and of the second factor; the eigenvalue solver comes on top."""
    short, long = sorted((x.m, x.n))
    return 2 * x.blocks * short * long * (short + r)


def fp64_rate(device: torch.device) -> float:
    """FLOP/s of a large product, measured here."""
    A = torch.randn(2048, 2048, device=device, dtype=torch.float64)
    times = [seconds(device, lambda: A @ A) for _ in range(5)]
    return 2 * 2048**3 / statistics.median(times)


def lapack(W: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain way: the SVD of the matrix as it lies there."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    root = S[:r].sqrt()
    return U[:, :r] * root, root[:, None] * Vh[:r]


def billion(device: torch.device) -> None:
    torch.manual_seed(0)
    with device:
        model = GPT(vocabulary=32_000, d=2048, layers=20, heads=16, context=1024)
    plan = pf.plan(model, rank=0.25)
    largest = max(e.before * e.itemsize for e in plan if e.rank is not None)
    base = 0
    if device.type == "cuda":
        torch.linalg.eigh(torch.eye(64, device=device, dtype=torch.float64))  # the solver's own workspace
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    spent = seconds(device, lambda: pf.factorize_(model, plan))
    print(f"Transformer, {plan.before.parameters:,} → {plan.after.parameters:,} parameters")
    print(f"  factorize_          {spent:8.3f} s   {len(plan.ranks)} layers")
    if device.type == "cuda":
        extra = torch.cuda.max_memory_allocated() - base
        print(
            f"  peak extra memory   {extra / 2**20:8.1f} MiB = {extra / largest:.2f} copies of the largest layer"
        )
        print(f"  memory afterwards   {(torch.cuda.memory_allocated() - base) / 2**20:8.1f} MiB")


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
