"""Whether Muon's momentum should be carried through the switch or reset.

    python benchmarks/muon_state.py enwik8.gz [--d 128 --layers 4 --context 128 --steps 600 --seeds 2] [--device cuda]

A byte-level GPT with Muon for the matrices of its blocks and AdamW for the rest. Each seed trains densely to the
switch once; from there both variants train on the same batches. Printed: mean training loss in the steps after the
switch and the validation loss at the end, in bits per byte. On CUDA in bf16 (autocast).
"""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import GPT
from pufferfish.planning.table import format_table

#: Steps after the switch whose mean training loss is printed.
WINDOWS = (10, 50)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("data", type=Path, help="enwik8.gz, or any gzipped file")
    for name, value in (("d", 128), ("layers", 4), ("heads", 4), ("context", 128), ("batch", 16)):
        ask.add_argument(f"--{name}", type=int, default=value)
    ask.add_argument("--steps", type=int, default=600)
    ask.add_argument("--seeds", type=int, default=2)
    ask.add_argument("--lr", type=float, default=4e-3)
    ask.add_argument("--rank", type=float, default=0.25)
    ask.add_argument("--at", type=float, default=1 / 3, help="share of the steps before the switch")
    ask.add_argument("--device", default="cpu")
    a = ask.parse_args()
    data = torch.frombuffer(bytearray(gzip.decompress(a.data.read_bytes())), dtype=torch.uint8)
    valid = data[int(0.9 * len(data)) :][: 200 * (a.context + 1)].reshape(200, -1).long().to(a.device)
    train = data[: int(0.9 * len(data))]
    print(f"{a.device}, Python {platform.python_version()}, torch {torch.__version__}, {vars(a)}\n")
    rows = [["seed", "state", *(f"training loss, first {n}" for n in WINDOWS), "validation"]]
    for seed in range(a.seeds):
        torch.manual_seed(seed)
        model = GPT(d=a.d, layers=a.layers, heads=a.heads, context=a.context).to(a.device)
        optimizers = build_optimizers(model, a.lr)
        batches = torch.Generator().manual_seed(seed)
        moment = round(a.at * a.steps)
        run(model, optimizers, train, range(moment), batches, a)
        for state in ("reset", "project"):
            twin, theirs = copy_of(model, optimizers, a.lr)
            same = torch.Generator()
            same.set_state(batches.get_state())
            pf.Switch(rank=a.rank, when=pf.AtStep(0), state=state).step(twin, theirs, step=0)
            losses = run(twin, theirs, train, range(moment, a.steps), same, a)
            with torch.no_grad():
                bits = sum(float(loss_of(twin, part)) for part in valid.split(20)) / 10 / math.log(2)
            means = [f"{sum(losses[:n]) / len(losses[:n]) / math.log(2):.4f}" for n in WINDOWS]
            rows.append([str(seed), state, *means, f"{bits:.4f}"])
            print(*rows[-1], flush=True)
    print("\n" + format_table(rows, left=(0, 1)))


def build_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    matrices, rest = pf.muon_parameters(model)
    muon = pf.Muon(matrices, lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0)]


def copy_of(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], lr: float
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    twin = copy.deepcopy(model)
    theirs = build_optimizers(twin, lr)
    for one, other in zip(theirs, optimizers, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    return twin, theirs


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    device = windows.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def run(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    data: Tensor,
    steps: range,
    batches: torch.Generator,
    a: argparse.Namespace,
) -> list[float]:
    """Train on random windows with a cosine schedule; return the loss of every step."""
    losses = []
    for step in steps:
        rate = a.lr * min(
            1.0, (step + 1) / (0.05 * a.steps), 0.55 + 0.45 * math.cos(math.pi * step / a.steps)
        )
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        starts = torch.randint(len(data) - a.context - 1, (a.batch,), generator=batches)
        windows = torch.stack([data[i : i + a.context + 1] for i in starts.tolist()]).long().to(a.device)
        loss = loss_of(model, windows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist() if losses else []


if __name__ == "__main__":
    main()
