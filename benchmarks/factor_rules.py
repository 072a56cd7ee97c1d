"""How to train the factors of a language model with Muon: rules compared on one task, at the same learning rates.

    python benchmarks/factor_rules.py enwik8.gz [--rules dense muon …] [--lrs 2e-3 4e-3] [--minutes 9]
    python benchmarks/factor_rules.py --show          # the table, from benchmarks/results/factor_rules.jsonl

A byte-level GPT with Muon for the matrices of its blocks and AdamW for the rest; bits per byte of validation data after the
last step. RULES below says what each rule does. All low-rank models have the same number of parameters in their blocks
(`--share` of the dense ones), whatever their ranks and dense layers; "narrow" is a dense model with as many. A rule runs with
every rate and seed; runs that are in the file, with the same settings, are not repeated. The best rate of a rule is that of
its first seed. On CUDA: bf16, every step one CUDA graph, of which the data, the schedule and the optimizers are part.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from factor_optimizers import Factors, ScaledMuon
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import GPT
from pufferfish.lab.report.formatting import format_estimate
from pufferfish.lab.report.seed_statistics import estimate, paired_differences
from pufferfish.planning.table import format_table
from pufferfish.planning.timing import capture_cuda_graph

FILE = Path(__file__).parent / "results" / "factor_rules.jsonl"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a model becomes low-rank, and how its factors are trained."""

    low_rank: bool = True
    narrow: bool = False  # a narrower dense model instead
    at: float = 1 / 3  # share of the steps before the switch
    back: float = 2.0  # share of the steps after which the model is dense again
    state: str = "project"  # what becomes of Muon's momentum at the switch
    step: str = "muon"  # "muon": each factor on its own; "tangent" and "bounded": see `Factors`
    up: float = 1.0  # multiplies the learning rate of second factors
    down: float = 1.0  # and of first factors
    frobenius: bool = False  # weight decay of the product, not of the factors
    between: str = ""  # "silu" or "norm" between the factors, which can no longer be merged
    dense: tuple[str, ...] = ()  # layers that stay dense
    weights: dict[str, float] = field(default_factory=dict)  # pattern → its ranks relative to the others'


RULES = {
    "dense": Rule(low_rank=False),
    "narrow": Rule(low_rank=False, narrow=True),
    "muon": Rule(),
    "muon, reset": Rule(state="reset"),
    "muon, from the start": Rule(at=0.0),
    "muon, after a tenth": Rule(at=0.1),
    "muon, dense from 70 %": Rule(at=0.1, back=0.7),
    "muon, dense from 80 %": Rule(at=0.1, back=0.8),
    "muon, dense from 90 %": Rule(at=0.1, back=0.9),
    "muon, rates × 2": Rule(up=2.0, down=2.0),
    "muon, rates × 0.5": Rule(up=0.5, down=0.5),
    "muon, up × 2": Rule(up=2.0),
    "muon, down × 2": Rule(down=2.0),
    "tangent": Rule(step="tangent"),
    "tangent × 2": Rule(step="tangent", up=2.0, down=2.0),
    "tangent × 4": Rule(step="tangent", up=4.0, down=4.0),
    "tangent × 2, from the start": Rule(step="tangent", up=2.0, down=2.0, at=0.0),
    "bounded × 4": Rule(step="bounded", up=4.0, down=4.0),
    "bounded × 16": Rule(step="bounded", up=16.0, down=16.0),
    "Frobenius decay": Rule(frobenius=True),
    "SiLU between, from the start": Rule(between="silu", at=0.0),
    "norm between, from the start": Rule(between="norm", at=0.0),
    "v and o dense": Rule(dense=("*.v", "*.o")),
    "q and k dense": Rule(dense=("*.q", "*.k")),
    "first block dense": Rule(dense=("blocks.0.*",)),
    "ranks of q, k halved": Rule(weights={"*.q": 0.5, "*.k": 0.5}),
    "equal shares": Rule(
        weights={"*.attention.*": 0.625}
    ),  # every matrix keeps the same share of its weights
    "ranks of attention halved": Rule(weights={"*.attention.*": 0.5}),
    "ranks of attention quartered": Rule(weights={"*.attention.*": 0.25}),
    "ranks of attention doubled": Rule(weights={"*.attention.*": 2.0}),
}


class Run:
    """One training run."""

    def __init__(self, rule: Rule, lr: float, seed: int, data: Tensor, a: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.rule, self.a, self.device = rule, a, data.device
        self.dense_size = matrix_weights(self._build(1.0))
        torch.manual_seed(seed)
        self.model = self._build(narrow_width(self._build, a.share * self.dense_size) if rule.narrow else 1.0)
        self.optimizers = build_optimizers(self.model, lr, self.device)
        self.low_rank_size = matrix_weights(self.model)
        train = data[: int(0.9 * len(data))]
        order = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(train) - a.context - 1, (a.steps, a.batch), generator=order)
        self.train, self.starts = train, starts.to(self.device)
        held = data[int(0.9 * len(data)) :][: a.held * (a.context + 1)]
        self.held = held.reshape(-1, a.context + 1)
        t = torch.arange(a.steps, dtype=torch.float64)
        shape = torch.minimum((t + 1) / (0.05 * a.steps), 0.55 + 0.45 * torch.cos(math.pi * t / a.steps))
        self.rates = (lr * shape.clamp(max=1)).float().to(self.device)
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)
        self.lr = torch.zeros((), device=self.device)
        self._set_lr()

    def _build(self, width: float) -> GPT:
        a = self.a
        return GPT(d=a.d, layers=a.layers, heads=a.heads, context=a.context, width=width).to(self.device)

    def train_all(self) -> float:
        """Train to the end; bits per byte of the held-out data."""
        moments = {round(self.rule.at * self.a.steps): self._to_low_rank} if self.rule.low_rank else {}
        moments[round(self.rule.back * self.a.steps)] = self._to_dense
        changes = [0, *sorted(t for t in moments if 0 < t < self.a.steps), self.a.steps]
        for first, last in itertools.pairwise(changes):
            moments.get(first, lambda: None)()
            self._train(last - first)
            self.model.zero_grad()  # a switch refuses gradients that might still be used
        with torch.no_grad():
            losses = [self._loss(part) for part in self.held.split(self.a.batch)]
            return float(torch.stack(losses).mean()) / math.log(2)

    def _train(self, steps: int) -> None:
        step = self._step
        if self.device.type == "cuda" and steps > 4:
            step()  # builds the optimizers' state
            step = capture_cuda_graph(step)  # which runs it three times for real
            steps -= 4
        for _ in range(steps):
            step()

    def _step(self) -> None:
        # `index_select`, because indexing by a tensor without dimensions waits for the GPU.
        t, context = self.t, torch.arange(self.a.context + 1, device=self.device)
        self.lr.copy_(self.rates.index_select(0, t)[0])
        starts = self.starts.index_select(0, t)[0]
        for p in self.model.parameters():
            p.grad = None
        self._loss(self.train[starts[:, None] + context]).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        t.add_(1)

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def _set_lr(self) -> None:
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.lr

    def _to_low_rank(self) -> None:
        rule, model = self.rule, self.model
        plan = plan_for(model, rule, self.a.share * self.dense_size)
        pf.Switch(plan=plan, when=pf.AtStep(0), state=rule.state).step(model, self.optimizers, step=0)
        self.low_rank_size = matrix_weights(model)
        layers = [x for x in model.modules() if isinstance(x, pf.layers.LowRankLinear)]
        for layer in layers if rule.between else ():
            layer.down.register_forward_hook(BETWEEN[rule.between])
        if rule.step == "muon" and rule.up == rule.down == 1 and not rule.frobenius:
            return
        muon, rest = self.optimizers
        pairs = [(layer.up.weight, layer.down.weight) for layer in layers]
        own = {id(p) for pair in pairs for p in pair}
        decay = muon.param_groups[0]["weight_decay"]
        others = [p for group in muon.param_groups for p in group["params"] if id(p) not in own]
        momentum = {p: muon.state[p] for p in muon.state if id(p) in own}
        self.optimizers = [build_muon(others, decay), rest] if others else [rest]
        if rule.step != "muon":
            tangent = rule.step == "tangent"
            news = [Factors(pairs, tangent=tangent, up=rule.up, down=rule.down, decay=decay)]
        elif rule.frobenius:
            news = [build_muon([p for pair in pairs for p in pair], 0.0)]
            pf.FrobeniusDecay(model, news[0], strength=decay)
        else:
            sides = [([U for U, _ in pairs], rule.up), ([V for _, V in pairs], rule.down)]
            news = [build_muon(params, decay, rate) for params, rate in sides]
        for new in news:
            own_params = [p for group in new.param_groups for p in group["params"]]
            new.state.update({p: momentum[p] for p in own_params if p in momentum})
        self.optimizers += news
        self._set_lr()

    def _to_dense(self) -> None:
        pf.merge_(self.model, optimizer=self.optimizers)


BETWEEN = {
    "silu": lambda layer, inputs, output: F.silu(output),
    "norm": lambda layer, inputs, output: F.rms_norm(output, output.shape[-1:]),
}


def build_muon(params: list[Tensor], decay: float, rate: float = 1.0) -> ScaledMuon:
    muon = ScaledMuon(params, lr=0.0, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    muon.rate = rate
    return muon


def build_optimizers(model: nn.Module, lr: float, device: torch.device) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    matrices, rest = pf.muon_parameters(model)
    fast = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    return [
        build_muon(matrices, 0.1),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0, **fast),
    ]


def matrix_weights(model: nn.Module) -> int:
    """Parameters of the blocks' matrices."""
    return sum(p.numel() for p in pf.muon_parameters(model)[0])


def bisect(size: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The largest argument in [low, high] whose size is not above the target; the size grows with its argument."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) <= target else (low, middle)
    return low


def narrow_width(build: Callable[[float], GPT], target: float) -> float:
    return bisect(lambda width: matrix_weights(build(width)), target, 0.05, 1.0)


def plan_for(model: nn.Module, rule: Rule, target: float) -> pf.Plan:
    """The plan whose blocks have `target` weights, with ranks in multiples of 8 for matrices of equal size."""

    def make(ratio: float) -> pf.Plan:
        shares = {pattern: min(ratio * weight, 0.99) for pattern, weight in rule.weights.items()}
        return pf.plan(model, rank=ratio, keep=rule.dense, overrides=shares, multiple=8)

    def size(ratio: float) -> float:
        plan = make(ratio)
        return sum(e.after for e in plan if fnmatch(e.layer, "blocks.*"))

    return make(bisect(size, target, 0.02, 0.9))


def settings(a: argparse.Namespace) -> dict[str, Any]:
    size = {
        name: getattr(a, name)
        for name in ("d", "layers", "heads", "context", "batch", "steps", "held", "share")
    }
    return {**size, "device": a.device_name, "torch": torch.__version__, "python": platform.python_version()}


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def show(file: Path) -> None:
    """Print bits per byte by rule and rate, means over seeds, and how much each rule is above "narrow", paired by seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(file):
        groups.setdefault(json.dumps(row["settings"]), []).append(row)
    for about, rows in groups.items():
        print(about)
        rates = sorted({row["lr"] for row in rows})
        bits: dict[str, dict[float, dict[int, float]]] = {}
        for row in rows:
            # A run that diverged is the worst; comparisons with NaN are false.
            score = row["bits"] if math.isfinite(row["bits"]) else math.inf
            bits.setdefault(row["rule"], {}).setdefault(row["lr"], {})[row["seed"]] = score
        weights = {row["rule"]: row["weights"] for row in rows}
        best = {rule: min(own.values(), key=lambda seeds: seeds[min(seeds)]) for rule, own in bits.items()}
        table = [["rule", "weights in blocks", *(f"{rate:g}" for rate in rates), "seeds", "above narrow"]]
        for rule, own in bits.items():
            means = [f"{fmean(own[rate].values()):.4f}" if rate in own else "" for rate in rates]
            differences = paired_differences(best[rule], best.get("narrow", {}))
            above = estimate(differences) if all(map(math.isfinite, differences)) else None
            table.append([
                rule, f"{weights[rule]:,}", *means, f"{len(best[rule])}",
                format_estimate(above, 4, sign=True) if above and rule != "narrow" else "",
            ])  # fmt: skip
        print(format_table(table, left=(0,)) + "\n")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("data", type=Path, nargs="?", help="enwik8.gz, or any gzipped file")
    sizes = {"d": 512, "layers": 8, "heads": 8, "context": 512, "batch": 64, "steps": 1000, "held": 1024}
    for name, value in sizes.items():
        ask.add_argument(f"--{name}", type=int, default=value)
    ask.add_argument("--share", type=float, default=0.47, help="of the dense blocks' parameters")
    ask.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE")
    ask.add_argument("--lrs", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    ask.add_argument("--seeds", nargs="+", type=int, default=[0])
    ask.add_argument("--minutes", type=float, default=math.inf, help="start no run later")
    ask.add_argument("--out", type=Path, default=FILE)
    ask.add_argument("--show", action="store_true")
    a = ask.parse_args()
    if a.show or a.data is None:
        return show(a.out)
    begin = time.monotonic()
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    a.device_name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    data = torch.frombuffer(bytearray(gzip.decompress(a.data.read_bytes())), dtype=torch.uint8)
    needed = 10 * a.held * (a.context + 1)
    if len(data) < needed:
        ask.error(
            f"{a.data} has {len(data):,} bytes; the last tenth is for validation, so --held {a.held} with --context {a.context} "
            f"needs {needed:,}"
        )
    data = data.to("cuda" if cuda else "cpu")
    about = settings(a)
    done = {(row["rule"], row["lr"], row["seed"]) for row in rows_of(a.out) if row["settings"] == about}
    for seed in a.seeds:
        for lr in a.lrs:
            for name in a.rules:
                if (name, lr, seed) in done or time.monotonic() - begin > 60 * a.minutes:
                    continue
                start = time.monotonic()
                run = Run(RULES[name], lr, seed, data, a)
                row = {"rule": name, "lr": lr, "seed": seed, "bits": round(run.train_all(), 4)}
                row |= {"weights": run.low_rank_size, "seconds": round(time.monotonic() - start, 1)}
                print(json.dumps(row), flush=True)
                with a.out.open("a") as file:
                    file.write(json.dumps(row | {"settings": about}) + "\n")
    show(a.out)


if __name__ == "__main__":
    main()
