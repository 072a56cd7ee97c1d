"""The model is given: full training with compressed gradients, against LoRA, on two pre-trained models.

    pip install transformers gguf peft
    python examples/bilingual/bilingual.py --fetch && python examples/continue_lm/continue_lm.py --fetch   # into data/
    python benchmarks/given.py [STUDY ...] [--processes 2]      # run what is missing, with the folder DATA or data/
    python benchmarks/given.py [STUDY ...] --show

minilm-E       MiniLM (22.7 M parameters) becomes bilingual in E epochs of Multi30k, batch 64 on one worker; accuracy@1 of both
               directions. Every length is a complete schedule. minilm-E-4: 4 simulated workers of 16 sentence pairs;
               minilm-E-batch512: batch 512.
smollm2-N      SmolLM2-135M continued on German captions, N updates of 256 tokens on one worker; bits per byte.
…-choices      Other choices with PowerSGD, each at one rate, the best of its rank in the study without this ending:
               embeddings sent in bf16 rather than as factors, factors in bf16, and no error feedback.
…-factorized   Low rank from the start, by the weights alone or weighted by the inputs of each layer.

AdamW without weight decay, linear warm-up over a tenth of the updates and linear decay to 0, bf16 autocast. Every arm is
tried with its rates on the first seed, and validation chooses. Bytes are those that each of 4 workers sends in an update, by
the ring algorithms, at the end of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.compression import BFloat16, Method, PowerSGD, Settings
from pufferfish.lab.data.dataset import read_files
from pufferfish.lab.harness import Job, Row, Study, main
from pufferfish.lab.tasks import multi30k
from pufferfish.lab.train.simulated import SimulatedDDP

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path += [str(EXAMPLES / "bilingual"), str(EXAMPLES / "continue_lm")]
import bilingual  # noqa: E402
import continue_lm  # noqa: E402

DATA = Path(os.environ.get("DATA", "data"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Arm:
    """A way of training a given model."""

    method: Method | dict[str, Method] = field(default_factory=BFloat16)
    error_feedback: bool | None = None  # None: as suits the method
    lora: int = 0  # rank of the adapters on all linear layers, with alpha = 2 × rank
    switch: float = 0.0  # rank ratio of a switch to low rank after a tenth
    # Low rank 0.5 from the start, with the least ‖W − UV‖ ("weights") or ‖(W − UV) X‖ ("inputs").
    factorize: str = ""


FULL, LORA = (2e-4, 4e-4, 8e-4, 1.6e-3), (1e-3, 2e-3, 4e-3, 8e-3)
ARMS = {
    "full training, bf16": (Arm(), FULL),
    "block int8": (Arm(pf.compression.BlockInt8()), FULL),
    "LoCo, 4 bits": (Arm(pf.compression.LoCo()), FULL),
    "PowerSGD(16)": (Arm(PowerSGD(16)), FULL),
    "PowerSGD(16), 5 plain": (Arm(PowerSGD(16, start=5)), FULL),
    "PowerSGD(4)": (Arm(PowerSGD(4)), FULL),
    "PowerSGD(4), 5 plain": (Arm(PowerSGD(4, start=5)), FULL),
    "PowerSGD(1)": (Arm(PowerSGD(1)), FULL),
    "LoRA 64": (Arm(lora=64), LORA),
    "LoRA 16": (Arm(lora=16), LORA),
    "LoRA 4": (Arm(lora=4), LORA),
    "low rank 0.5 after a tenth": (Arm(switch=0.5), FULL),
    "low rank 0.5, by the weights": (Arm(factorize="weights"), FULL),
    "low rank 0.5, by the inputs": (Arm(factorize="inputs"), FULL),
    "PowerSGD(16), embeddings in bf16": (Arm({"*embed*": BFloat16(), "*": PowerSGD(16)}), FULL),
    "PowerSGD(16), factors in bf16": (Arm(PowerSGD(16, bf16=True)), FULL),
    "PowerSGD(16), no error feedback": (Arm(PowerSGD(16), error_feedback=False), FULL),
    "PowerSGD(4), embeddings in bf16": (Arm({"*embed*": BFloat16(), "*": PowerSGD(4)}), FULL),
}
CHOICES = [name for name in ARMS if name.endswith((" in bf16", "no error feedback"))]
FACTORIZED = ["low rank 0.5, by the weights", "low rank 0.5, by the inputs"]
SHORT = [name for name in ARMS if name not in CHOICES + FACTORIZED]
SUMS = [name for name in SHORT if name != "low rank 0.5 after a tenth"]
LONG = [name for name in SUMS if name not in ("block int8", "LoCo, 4 bits")]
MIDDLE = [name for name in LONG if "plain" not in name and name != "PowerSGD(1)"]


class Bilingual:
    """MiniLM on Multi30k."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.pairs, self.batch = _pairs(), settings["batch"]
        self.updates = round(settings["epochs"] * self.pairs["train"][0].shape[1] / self.batch)
        self.model: nn.Module = bilingual.Encoder(DATA / "minilm")

    def batches(self, generator: torch.Generator, update: int, workers: int) -> list[tuple[Any, ...]]:
        order = _order(generator, self.pairs["train"][0].shape[1], update * self.batch, self.batch)
        return [bilingual.take(self.pairs["train"], rows) for rows in order.chunk(workers)]

    def loss(self, model: nn.Module) -> Callable[..., Tensor]:
        return lambda ids, mask: bilingual.contrast(model, ids, mask)

    def score(self, model: nn.Module, split: str) -> float:
        return bilingual.accuracy(model, *self.pairs["val" if split == "validation" else "test2016"])


class Captions:
    """SmolLM2-135M on the German sentences of Multi30k."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rows, self.batch, self.updates = _rows(), settings["rows"], settings["updates"]
        self.model: nn.Module = continue_lm.load_model(DATA)

    def batches(self, generator: torch.Generator, update: int, workers: int) -> list[tuple[Any, ...]]:
        rows = self.rows["train"][0]
        return [
            (rows[i],) for i in _order(generator, len(rows), update * self.batch, self.batch).chunk(workers)
        ]

    def loss(self, model: nn.Module) -> Callable[..., Tensor]:
        return lambda tokens: continue_lm.next_token_loss(model, tokens)

    def score(self, model: nn.Module, split: str) -> float:
        rows, size = self.rows["val" if split == "validation" else "test2016"]
        rows = rows[:192]
        return continue_lm.bits_per_byte(model, rows, size * rows[:, 1:].numel())


TASKS: dict[str, Callable[[dict[str, Any]], Bilingual | Captions]] = {
    "minilm": Bilingual,
    "smollm2": Captions,
}


def prepare(arm: Arm, model: nn.Module, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, with adapters if the arm has them, and the optimizer of what is trained."""
    model = model.to(DEVICE).train()
    if arm.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=arm.lora, lora_alpha=2 * arm.lora, target_modules="all-linear")
        model = get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)


@torch.no_grad()
def factorize_(
    model: nn.Module, by: str, loss: Callable[..., Tensor], batches: list[tuple[Any, ...]]
) -> None:
    """Make a model low-rank, with the least ‖W − UV‖, or ‖(W − UV) X‖ for the inputs X of each layer in some batches.

    With C Cᵀ = X Xᵀ, the factors for the inputs are those of W C, the second one times C⁻¹.
    """
    plan = pf.plan(model, rank=0.5)
    layers = {name: model.get_submodule(name) for name in plan.ranks} if by == "inputs" else {}
    roots: dict[str, Any] = dict.fromkeys(layers, 0)

    def add(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2).float()
        roots[name] = roots[name] + x.T @ x

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
        for name, layer in layers.items()
    ]
    for batch in batches if layers else []:
        loss(*batch)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        roots[name].diagonal().add_(0.01 * roots[name].diagonal().mean())
        roots[name] = torch.linalg.cholesky(roots[name])
        layer.weight.copy_(layer.weight @ roots[name])
    pf.factorize_(model, plan)
    for name, root in roots.items():
        down = model.get_submodule(name).down.weight
        down.copy_(torch.linalg.solve_triangular(root, down, upper=False, left=False))


def run(job: Job) -> Row:
    """Train one arm to the end of its schedule."""
    settings, (arm, _) = dict(job.settings), ARMS[job.arm]
    torch.manual_seed(job.seed)
    task = TASKS[settings["task"]](settings)
    if arm.factorize:
        batches = [task.batches(torch.Generator().manual_seed(job.seed), n, 1)[0] for n in range(16)]
        factorize_(task.model.to(DEVICE), arm.factorize, task.loss(task.model), batches)
    model, optimizer = prepare(arm, task.model, job.rate)
    compressed = Settings(arm.method, error_feedback=arm.error_feedback, seed=job.seed)
    ddp = SimulatedDDP(model, compressed, settings["workers"], optimizer=optimizer)
    switch = pf.Switch(rank=arm.switch, when=pf.AtFraction(0.1)) if arm.switch else None
    warm_up, sent = max(task.updates // 10, 1), 0.0
    for update in range(task.updates):
        if switch:
            switch.step(model, optimizer, step=update, total=task.updates)
        for group in optimizer.param_groups:
            group["lr"] = job.rate * min(
                (update + 1) / warm_up, (task.updates - update) / (task.updates - warm_up)
            )
        batch = task.batches(torch.Generator().manual_seed(job.seed), update, settings["workers"])
        sent = wire_bytes(ddp)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            ddp.backward(task.loss(model), batch)
        if settings["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
    embedding = next(p for name, p in model.named_parameters() if "embed" in name).grad
    with torch.autocast(DEVICE.type, torch.bfloat16):
        scores = {split: task.score(model, split) for split in ("validation", "test")}
    return scores | {
        "updates": task.updates,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "wire_bytes": wire_bytes(ddp) - sent,
        "embedding_rows": 0
        if embedding is None
        else int(embedding.any(1).sum()),  # of the gradient, not zero
        "optimizer_bytes": sum(
            x.nbytes for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
        ),
    }


def wire_bytes(ddp: SimulatedDDP, workers: int = 4) -> float:
    """What each of 4 workers would have sent so far, by the ring algorithms.

    Methods that reduce by an all-to-all gather a share of the mean from each worker: from the only one, all of it.
    """
    factor = {
        "all_reduce": 2 / workers,
        "all_gather": 1.0,
        "all_to_all": 1 / workers,
        "broadcast": 1 / workers,
    }
    given: dict[str, float] = dict(ddp.meter.collective_bytes)
    if given["all_to_all"]:
        given["all_gather"] *= ddp.size / workers
    return sum(factor[kind] * (workers - 1) * given[kind] for kind in given)


def _order(generator: torch.Generator, n: int, start: int, count: int) -> Tensor:
    """The next rows of an endless shuffle, anew for each epoch."""
    wanted = torch.arange(start, start + count)
    epochs = [torch.randperm(n, generator=generator) for _ in range(int(wanted[-1]) // n + 1)]
    return torch.cat(epochs)[wanted]


@lru_cache
def _pairs() -> dict[str, Any]:
    return {
        split: (ids.to(DEVICE), mask.to(DEVICE)) for split, (ids, mask) in bilingual.load_pairs(DATA).items()
    }


@lru_cache
def _rows() -> dict[str, tuple[Tensor, float]]:
    tokenizer = continue_lm.Tokenizer.from_file(str(DATA / "smollm2/tokenizer.json"))
    files, found = read_files(multi30k.DATASET, DATA), {}
    for split in ("train", "val", "test2016"):
        rows, size = continue_lm.load_rows(tokenizer, files[f"{split}.de"].text(), 64)
        found[split] = rows.to(DEVICE), size
    return found


def minilm(epochs: float, arms: list[str], workers: int = 1, rates: int = 4, batch: int = 64) -> Study:
    ending = (f"-{workers}" if workers > 1 else "") + (f"-batch{batch}" if batch != 64 else "")
    return Study(
        name=f"minilm-{epochs:g}{ending}", run=run,
        arms={name: ARMS[name][1][:rates] for name in arms}, baseline="full training, bf16",
        score="accuracy@1, %", columns={"trained": ",.0f", "wire_bytes": ",.0f", "optimizer_bytes": ",.0f"},
        settings={"task": "minilm", "epochs": epochs, "batch": batch, "workers": workers, "clip": 0},
    )  # fmt: skip


def smollm2(updates: int, arms: list[str]) -> Study:
    # Three rates for each arm, around those that were best in first trials of this length.
    full = (1e-4, 2e-4, 4e-4) if updates < 100 else (2e-4, 4e-4, 8e-4)
    rates = {FULL: full, LORA: (1e-3, 2e-3, 4e-3)}
    return Study(
        name=f"smollm2-{updates}", run=run, arms={name: rates[ARMS[name][1]] for name in arms},
        baseline="full training, bf16", score="bits per byte", higher=False, digits=3,
        columns={"trained": ",.0f", "wire_bytes": ",.0f", "optimizer_bytes": ",.0f"},
        settings={"task": "smollm2", "updates": updates, "rows": 4, "workers": 1, "clip": 1.0},
    )  # fmt: skip


def factorized(study: Study) -> Study:
    arms = dict.fromkeys(FACTORIZED, FULL)
    return replace(study, name=f"{study.name}-factorized", arms=arms, baseline=FACTORIZED[0])


def choices(study: Study, rates: dict[str, float]) -> Study:
    """PowerSGD with other choices, each at the rate that is best without them."""
    arms = {
        name: (rate,) for start, rate in rates.items() for name in (start, *CHOICES) if name.startswith(start)
    }
    columns = study.columns | {"embedding_rows": ",.0f"}
    return replace(study, name=f"{study.name}-choices", arms=arms, baseline="PowerSGD(16)", columns=columns)


STUDIES = [
    minilm(0.3, SHORT), minilm(2, LONG), minilm(0.3, LONG, workers=4),
    smollm2(40, SUMS), smollm2(160, SUMS),
    minilm(0.1, LONG), minilm(0.6, MIDDLE, rates=3), minilm(1, MIDDLE, rates=3), minilm(2, MIDDLE, batch=512),
    choices(minilm(0.3, []), {"PowerSGD(16)": 8e-4, "PowerSGD(4)": 4e-4}),
    choices(minilm(0.3, [], workers=4), {"PowerSGD(16)": 4e-4}), choices(smollm2(160, []), {"PowerSGD(16)": 4e-4}),
    factorized(minilm(0.3, [])), factorized(smollm2(40, [])),
]  # fmt: skip

if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main(STUDIES, __doc__)
