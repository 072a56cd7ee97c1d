"""The demo: a small language model planned, trained, switched to low rank, trained on, merged. A minute on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf

from ..table import aligned
from .models.gpt import GPT

WARM_UP, STEPS, BATCH, CONTEXT = 80, 240, 16, 64


def demo() -> None:
    """Run it and print the story. The text to learn is this package's own source code."""
    text, held_out = _text()
    model = _model()
    print(f"A character model ({_count(model):,} parameters) learns Pufferfish's source code on "
          f"{torch.get_num_threads()} CPU threads.\n\n1. The plan, before anything happens\n")  # fmt: skip
    plan = pf.plan(model, rank=0.25, keep=["blocks.0.*"], example=(held_out[:, :-1],))
    print(plan)

    print(f"\n2. {WARM_UP} steps full-rank, then the switch\n")
    optimizer = _optimizer(model)
    batches = _batches(text)
    _train([(model, optimizer)], batches, WARM_UP)
    before = _loss(model, held_out)
    dense_model = _model()
    dense_model.load_state_dict(model.state_dict())
    dense_optimizer = _optimizer(dense_model)
    dense_optimizer.load_state_dict(optimizer.state_dict())

    start = time.perf_counter()
    done = pf.factorize_(model, plan, optimizer)
    seconds = time.perf_counter() - start
    worst = max((e.error, e.name) for e in done if e.error is not None)
    print(f"SVD of {len(done.ranks)} layers in {seconds:.2f} s; momentum carried over; "
          f"largest relative error {worst[0]:.3f} in {worst[1]}.")  # fmt: skip
    print(f"Held-out loss {before:.3f} before the switch, {_loss(model, held_out):.3f} just after.")

    print(f"\n3. {STEPS - WARM_UP} more steps, low-rank and full-rank side by side on the same batches\n")
    runs = [(dense_model, dense_optimizer), (model, optimizer)]
    dense_ms, low_ms = _train(runs, batches, STEPS - WARM_UP)
    dense_loss, low_loss = _loss(dense_model, held_out), _loss(model, held_out)
    size = 4 / 1e6
    print(aligned([
        ["", "full-rank", "low-rank", ""],
        ["held-out loss", f"{dense_loss:.3f}", f"{low_loss:.3f}", f"{low_loss - dense_loss:+.3f}"],
        ["MB to all-reduce a step", f"{_count(dense_model) * size:.2f}", f"{_count(model) * size:.2f}",
         f"{_count(dense_model) / _count(model):.2f}× less"],
        ["ms a step on this machine", f"{dense_ms:.1f}", f"{low_ms:.1f}", _ratio(dense_ms, low_ms)],
    ], left=(0, 3)))  # fmt: skip

    print("\n4. Merged back into an ordinary model\n")
    model.eval()
    with torch.no_grad():
        expected = model(held_out[:, :-1])
        pf.merge_(model, optimizer)
        error = float((model(held_out[:, :-1]) - expected).abs().max() / expected.abs().max())
    same = [n for n, _ in model.named_parameters()] == [n for n, _ in dense_model.named_parameters()]
    if error > 1e-4 or not same:
        raise RuntimeError(f"the merged model differs: relative error {error:.2g}, same parameters: {same}")
    print(f"{_count(model):,} parameters again, the same names, outputs equal to {error:.1e}.")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=128, d=128, layers=4, heads=4, context=CONTEXT)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _text() -> tuple[Tensor, Tensor]:
    """Training characters, and 32 held-out lines of `CONTEXT` + 1 characters from the end."""
    files = sorted(Path(pf.__file__).parent.rglob("*.py"))
    code = "\n".join(path.read_text() for path in files).encode("ascii", "replace")
    data = torch.tensor(list(code))
    cut = 32 * (CONTEXT + 1)
    return data[:-cut], data[-cut:].view(32, -1)


def _batches(text: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        yield torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()])


def _train(
    runs: list[tuple[nn.Module, torch.optim.Optimizer]], batches: Iterator[Tensor], steps: int
) -> list[float]:
    """Train each model on the same batches, taking turns; returns each one's median milliseconds a step."""
    times: list[list[float]] = [[] for _ in runs]
    for batch, _ in zip(batches, range(steps), strict=False):
        for (model, optimizer), seen in zip(runs, times, strict=True):
            start = time.perf_counter()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(seen) for seen in times]


@torch.no_grad()
def _loss(model: nn.Module, batch: Tensor) -> float:
    return float(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))


def _ratio(dense_ms: float, low_ms: float) -> str:
    return f"{dense_ms / low_ms:.2f}× faster" if low_ms < dense_ms else f"{low_ms / dense_ms:.2f}× slower"


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
