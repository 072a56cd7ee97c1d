"""What recomputation costs and saves: training steps of a 1B-shape llama, dense and low-rank.

    python benchmarks/recompute.py [--modes eager graph compiled] [--losses plain chunks]

Forward, loss, backward and an SGD step with bf16 autocast. Blocks keep all activations ("none"), only their inputs
("ordinary" checkpointing) or what `pf.recompute_` keeps ("ours"). Memory is what a step allocates beside weights,
gradients, optimizer state and batch: "kept" when the loss is known, "peak" until the end of backward. Ratios are to
"none" of the same model.

The logits of a large vocabulary belong to no block, and plain cross-entropy makes several copies of them. With "chunks"
the loss is computed for a sixteenth of the tokens at a time, with its gradient, for all rows alike. A graph's memory
is a pool that is allocated once, so that only its time is measured.
"""

from __future__ import annotations

import argparse
import gc
import platform
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from step import medians
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pufferfish as pf
from pufferfish.lab.models.llama import Llama
from pufferfish.planning.table import format_table
from pufferfish.planning.timing import capture_cuda_graph

GPU = {
    "vocabulary": 128_256,
    "d": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "inner": 8192,
    "context": 2048,
}
CPU = {"vocabulary": 512, "d": 128, "layers": 4, "heads": 4, "kv_heads": 1, "inner": 512, "context": 64}
CASES = [
    ("dense", "none"),
    ("dense", "ordinary"),
    ("low-rank", "none"),
    ("low-rank", "ordinary"),
    ("low-rank", "ours"),
]
CHUNKS = 16

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", choices=["eager", "graph", "compiled"], default=["eager", "compiled"]
    )
    parser.add_argument("--losses", nargs="+", choices=["plain", "chunks"], default=["plain", "chunks"])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}"
    )
    # `recompute_` sets it too: else the compiler does not checkpoint layers that share an input.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    shape, batch = (GPU, 8) if device.type == "cuda" else (CPU, 2)
    print(f"llama {shape}, batch {batch}, bf16 autocast; low-rank: ratio 0.25, first block dense\n")

    rows = [["loss", "mode", "model", "recomputes", "ms", "", "kept GiB", "", "peak GiB", ""]]
    results: dict[tuple[str, ...], tuple[float, ...]] = {}
    model: nn.Module = nn.Module()
    built, run = "", model
    for kind, recomputation in CASES:
        if kind != built:
            model = run = nn.Module()  # frees the one before
            gc.collect()
            model, built = build(kind, shape, device), kind
        set_recomputation(model, recomputation)
        for mode in arguments.modes:
            torch._dynamo.reset()
            run = torch.compile(model) if mode == "compiled" else model
            for loss in arguments.losses:
                print(f"measuring {kind}, {recomputation}, {mode}, {loss} …", flush=True)
                results[loss, mode, kind, recomputation] = measure(
                    model, run, shape, batch, device, mode, loss
                )
    for loss in arguments.losses:
        for mode in arguments.modes:
            for kind, recomputation in CASES:
                found, base = results[loss, mode, kind, recomputation], results[loss, mode, kind, "none"]
                cells = [loss, mode, kind, recomputation]
                for value, whole in zip(found, base, strict=True):
                    known = whole == whole and whole > 0  # not NaN
                    cells += [f"{value:.2f}", f"{value / whole:.2f}×"] if known else ["–", ""]
                rows.append(cells)
    print("\n" + format_table(rows, left=(0, 1, 2, 3)))


def build(kind: str, shape: dict[str, int], device: torch.device) -> nn.Module:
    """The model without its output layer, which is part of the loss."""
    torch.manual_seed(0)
    with device:
        model = Llama(**shape)  # type: ignore[arg-type]
    model.head = nn.Identity()  # type: ignore[assignment]
    if kind == "low-rank":
        example = torch.zeros(1, shape["context"], dtype=torch.long, device=device)
        pf.reshape_(model, pf.plan(model, rank=0.25, keep=["blocks.0.*"], example=example))
        for p in model.parameters():
            nn.init.normal_(p, std=0.02)  # speed does not depend on the weights: the SVDs would take minutes
    return model


def set_recomputation(model: nn.Module, recomputation: str) -> None:
    for block in model.get_submodule("blocks").children():
        vars(block).pop("forward", None)
        if recomputation == "ordinary":
            block.forward = MethodType(ordinary, block)
    if recomputation == "ours":
        pf.recompute_(model, ["blocks.*"])


def ordinary(self: nn.Module, *args: Any) -> Any:
    # A graph cannot save the generator's state; there is no dropout here.
    return checkpoint(type(self).forward, self, *args, use_reentrant=False, preserve_rng_state=False)


def measure(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    shape: dict[str, int],
    batch: int,
    device: torch.device,
    mode: str,
    loss: str,
) -> tuple[float, float, float]:
    """Milliseconds of a step, and GiB kept and at the peak (NaN where they cannot be measured)."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(
        shape["vocabulary"], (batch, shape["context"] + 1), generator=generator, device=device
    )
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    losses: dict[str, Loss] = {
        "plain": torch.compile(plain_loss) if mode == "compiled" else plain_loss,
        "chunks": LossInChunks.apply,
    }
    memory = [0, 0, 0]
    torch.cuda.empty_cache()  # a graph's pool

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # memory of the gradients is not counted
        if measuring:
            torch.cuda.reset_peak_memory_stats()
            memory[0] = torch.cuda.memory_allocated()
        # A cache would be filled outside of a captured graph.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            value = losses[loss](run(x).flatten(0, 1), model.get_parameter("embedding.weight"), y)
        if measuring:
            memory[1] = torch.cuda.memory_allocated()
        value.backward()
        if measuring:
            memory[2] = torch.cuda.max_memory_allocated()
        optimizer.step()

    measuring = False
    for _ in range(2):  # creates gradients and optimizer state, compiles
        step()
    measuring = device.type == "cuda" and mode != "graph"
    if measuring:
        step()
        measuring = False
    timed = capture_cuda_graph(step) if mode == "graph" else step
    (milliseconds,) = medians(device, [timed], turns=3)
    for p in model.parameters():
        p.grad = None
    nan = float("nan")
    kept, peak = ((m - memory[0]) / 2**30 if memory[2] else nan for m in memory[1:])
    return milliseconds, kept, peak


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


class LossInChunks(torch.autograd.Function):
    """`plain_loss` whose logits are never all in memory: the gradients are computed in forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        x, w = hidden.bfloat16(), weight.bfloat16()
        grad_x, grad_w, total = (
            torch.empty_like(x),
            torch.zeros_like(weight),
            x.new_zeros((), dtype=torch.float32),
        )
        for part, y, grad in zip(x.chunk(CHUNKS), targets.chunk(CHUNKS), grad_x.chunk(CHUNKS), strict=True):
            logs = F.log_softmax((part @ w.T).float(), -1)
            total += F.nll_loss(logs, y, reduction="sum")
            error = logs.exp_()
            error[torch.arange(len(y), device=y.device), y] -= 1
            small = (error / len(x)).bfloat16()
            grad.copy_(small @ w)
            grad_w += small.T @ part
        ctx.save_for_backward(grad_x, grad_w)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad, grad_w.mul_(grad), None


if __name__ == "__main__":
    main()
