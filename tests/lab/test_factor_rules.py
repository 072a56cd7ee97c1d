"""benchmarks/factor_rules.py: the steps of a phase, the table, and the optimizers that it compares."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import benchmark

optimizers = benchmark("factor_optimizers")  # which factor_rules imports
rules = benchmark("factor_rules")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 9])
def test_a_phase_has_all_its_steps(steps: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is too short for a CUDA graph."""
    made = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        """As `capture_cuda_graph`: three steps are real, the captured one is not."""
        for _ in range(3):
            step()
        return step

    monkeypatch.setattr(rules, "capture_cuda_graph", capture)
    run = SimpleNamespace(device=SimpleNamespace(type=device), _step=lambda: made.append("step"))
    rules.Run._train(run, steps)
    assert len(made) == steps


def test_the_best_rate_is_not_one_that_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ("narrow", 2e-3, 0, 2.4), ("narrow", 2e-3, 1, 2.5), ("muon", 8e-3, 0, math.nan), ("muon", 8e-3, 1, 2.6),
        ("muon", 2e-3, 0, 2.5), ("muon", 2e-3, 1, 2.6), ("tangent", 2e-3, 0, math.nan), ("tangent", 2e-3, 1, 2.4),
    ]  # fmt: skip
    about = {"weights": 1, "settings": {}}
    lines = [json.dumps({"rule": r, "lr": lr, "seed": seed, "bits": x} | about) for r, lr, seed, x in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rules.show(tmp_path / "rows.jsonl")
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert shown["muon"] == ["muon", "1", "2.5500", "inf", "2", "+0.1000", "±", "0.0000"]
    assert shown["tangent"] == ["tangent", "1", "inf", "2"]


def test_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    monkeypatch.setattr("sys.argv", ["factor_rules.py", str(path), "--held", "8", "--context", "16"])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with pytest.raises(SystemExit):
        rules.main()
    message = "small.gz has 1,000 bytes; the last tenth is for validation, so --held 8 with --context 16 needs 1,360"
    assert message in capsys.readouterr().err


class Recorder(TorchDispatchMode):
    """Records operators, and the precision in which each matrix product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.precisions: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] in ("mm", "bmm"):
            self.precisions.add(torch.get_float32_matmul_precision())
        return func(*args, **kwargs or {})


@pytest.fixture
def high_precision() -> Iterator[None]:
    """As `factor_rules.main` sets it: TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("high_precision")
def test_inverse_roots_have_full_precision() -> None:
    torch.manual_seed(0)
    X = torch.randn(2, 16, 64) * torch.arange(1, 17).rsqrt()[:, None]
    with Recorder() as seen:
        found = optimizers.inverse_root(X)
    assert seen.precisions == {"highest"}
    assert torch.get_float32_matmul_precision() == "high"
    G = X.double() @ X.double().mT
    G += 1e-3 * G.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1) * torch.eye(16, dtype=torch.float64)
    L, Q = torch.linalg.eigh(G)
    torch.testing.assert_close(found.double(), Q * L.rsqrt()[:, None] @ Q.mT, rtol=1e-4, atol=1e-5)


def test_momentum_is_allocated_once() -> None:
    U, V = (torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 2), (2, 8)))
    optimizer = optimizers.Factors([(U, V)], tangent=True, up=1.0, down=1.0, decay=0.1)
    for count in (2, 0):
        U.grad, V.grad = torch.ones_like(U), torch.ones_like(V)
        with Recorder() as seen:
            optimizer.step()
        assert seen.names.count("zeros_like") == count
