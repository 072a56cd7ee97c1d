"""Validation loss of a character model on tiny Shakespeare: dense, low-rank from the start, and through the switch.

    python benchmarks/shakespeare.py --data tinyshakespeare.txt [--seeds 0 1 2] [--steps 1500] [--arms …] [--out FILE]
    python benchmarks/shakespeare.py --table FILE...

GPT of 6 layers, d 384, 6 heads, context 256, dropout 0.2 on the embedding and on what each block adds; batch 64, bf16 autocast,
AdamW 0.9/0.99 with weight decay 0.1 not on 1-D tensors, LR 1e-3 after 100 steps of warm-up and down to 1e-4 by a cosine,
gradients clipped at 1. The first 90 % of the text are for training; the loss is the mean over the last 10 % after the last
step (nats a character), nothing selected on it. Differences are paired by seed, with 95 % intervals that are not
corrected for the number of comparisons. The arms branch off the dense run of their seed (`paired.py` says how).

Arms: all keep the first block full-rank. `low-rank` is ratio 0.25 from the first step, `warm-up` the same after a third of
the steps, `stable ranks` the automatic ranks at the same time. Frobenius decay has the strength of the weight decay it
replaces.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import paired
import torch
import torch.nn.functional as F
from paired import Arm, Claim
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import GPT

TURNS = 30  # so many looks at the switch
KEEP = ["blocks.0.*"]
LR, WARM_UP, DECAY, DROPOUT = 1e-3, 100, 0.1, 0.2

BENCHMARK = paired.Benchmark(
    name="shakespeare",
    measure="validation loss",
    digits=4,
    higher=False,
    claims=(
        Claim("the paper: warm-up over low-rank", "warm-up", "low-rank"),
        Claim("moments carried over moments reset", "warm-up", "warm-up, reset"),
        Claim("Frobenius decay over none, ratio 0.25", "warm-up, Frobenius", "warm-up"),
        Claim("Frobenius decay over none, stable ranks", "stable ranks, Frobenius", "stable ranks"),
        Claim("stable ranks over ratio 0.25", "stable ranks", "warm-up"),
    ),
)


def arms() -> dict[str, Arm]:
    third = pf.AtEpoch(TURNS // 3)

    def ratio(**settings: Any) -> pf.Switch:
        return pf.Switch(rank=0.25, keep=KEEP, **({"when": third} | settings))

    def stable() -> pf.Switch:
        return pf.Switch(keep=KEEP, when=third)

    return {
        "low-rank": Arm(switch=lambda: ratio(when=pf.AtEpoch(0))),
        "warm-up": Arm(switch=ratio),
        "warm-up, reset": Arm(switch=lambda: ratio(state="reset")),
        "warm-up, Frobenius": Arm(switch=ratio, decay=DECAY),
        "stable ranks": Arm(switch=stable),
        "stable ranks, Frobenius": Arm(switch=stable, decay=DECAY),
    }


def main() -> None:
    ask = paired.options(__doc__)
    ask.add_argument("--steps", type=int, default=1500, help=f"a multiple of {TURNS}")
    ask.add_argument("--batch", type=int, default=64)
    ask.add_argument("--small", action="store_true", help="a tiny model on little text, to try the script")
    given = ask.parse_args()
    if given.steps % TURNS:
        ask.error(f"--steps {given.steps} is not a multiple of {TURNS}")

    def start(seed: int, device: torch.device) -> Training:
        return Training(load(given.data, device, given.small), seed, given, device)

    paired.main(
        BENCHMARK, given, start, arms(), TURNS,
        steps=given.steps, batch=given.batch, small=given.small,
    )  # fmt: skip


def load(file: Path, device: torch.device, small: bool) -> tuple[Tensor, Tensor, int]:
    """Characters as numbers, for training and for validation, and how many there are."""
    text = file.read_text()[: 30_000 if small else None]
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text], device=device)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(letters)


class Training(paired.Run):
    """One run; a turn is a thirtieth of the steps."""

    def __init__(self, data: tuple[Tensor, Tensor, int], seed: int, given: Any, device: torch.device) -> None:
        self.text, self.held, letters = data
        self.steps, self.batch, self.device = given.steps, given.batch, device
        self.context, d, layers = (32, 64, 2) if given.small else (256, 384, 6)
        torch.manual_seed(seed)
        self.model = GPT(vocabulary=letters, d=d, layers=layers, heads=d // 64, context=self.context)
        self.model.to(device)
        for block in self.model.blocks:
            for module in (block.attention, block.down):  # what is added to the residual stream
                module.register_forward_hook(drop)
        self.model.embedding.register_forward_hook(drop)
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1]},
            {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, fused=device.type == "cuda"
        )
        self.generator = torch.Generator(device).manual_seed(seed)
        self.window = torch.arange(self.context + 1, device=device)

    def advance(self, turn: int, turns: int) -> None:
        self.model.train()
        each = self.steps // turns
        for now in range(turn * each, (turn + 1) * each):
            for group in self.optimizer.param_groups:
                group["lr"] = rate(now, self.steps)
            starts = torch.randint(
                len(self.text) - self.context, (self.batch, 1), generator=self.generator, device=self.device
            )
            loss = self._loss(self.text[starts + self.window])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def score(self) -> float:
        self.model.eval()
        starts = torch.arange(0, len(self.held) - self.context, self.context, device=self.device)
        windows = self.held[starts[:, None] + self.window]
        parts = windows.split(self.batch)
        return sum(float(self._loss(part)) * len(part) for part in parts) / len(windows)

    def _loss(self, windows: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return F.dropout(output, DROPOUT, module.training)


def rate(now: int, steps: int) -> float:
    if now < WARM_UP:
        return LR * (now + 1) / WARM_UP
    share = (now - WARM_UP) / max(steps - WARM_UP, 1)
    return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


if __name__ == "__main__":
    main()
