"""How long the SVDs of ResNet-50 take: every eligible layer at ratio 0.25, by `factorize_` and by `torch.linalg.svd`.

    python benchmarks/factorize.py

Both in one run, the second in fp32 layer by layer on the same matrices. Limits: 10 s on two cores, 1.5 s on an H200.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

import pufferfish as pf
from pufferfish.lab.models import REFERENCES


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}\n"
    )
    torch.manual_seed(0)
    model = REFERENCES["resnet50"].build().to(device)
    plan = pf.plan(model, rank=pf.Ratio(0.25, multiple=1))
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


def lapack(W: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain way: the SVD of the matrix as it lies there."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    root = S[:r].sqrt()
    return U[:, :r] * root, root[:, None] * Vh[:r]


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
