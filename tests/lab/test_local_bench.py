"""Local steps in the bench, the report and the advisor: timed in whole rounds, with utilisation, bytes a round and peak rate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from page import Page
from torch import nn

from processes import in_processes
from pufferfish.cli import main
from pufferfish.lab.advise import advise, advisor, load_workload, nominal_link
from pufferfish.lab.bench.bench import terminal_table
from pufferfish.lab.method_name import training_method
from pufferfish.lab.network import LinkShape
from pufferfish.lab.train.timing import TimedModel, steps_per_round

EXCHANGE = ("utilisation", "bytes per round", "largest exchange", "peak rate")
LOCAL = ("diloco(4)", "streaming(4,fragments=2)", "pufferfish+sparseloco(4)")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_bench_of_real_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "digits:mlp,width=16",
        "--epochs",
        "2",
        "--rounds",
        "1",
        "--per-node",
        "2",
        "--device",
        "cpu",
    ]
    assert main([*words, "--out", str(tmp_path / "out"), "--methods", ",".join(LOCAL)]) == 0
    shown = capsys.readouterr().out
    assert all(column in shown for column in EXCHANGE)
    (timings,) = [json.loads(path.read_text()) for path in (tmp_path / "out/timing").iterdir()]
    sent = {name: timing["bytes"] for name, timing in timings["methods"].items()}
    assert sent["diloco(4)"] == pytest.approx(sent["dense"] / 4, rel=0.01)
    assert sent["streaming(4,fragments=2)"] == pytest.approx(sent["dense"] / 4, rel=0.02)
    assert sent["pufferfish+sparseloco(4)"] < sent["dense"] / 100
    assert all(timings["steps"][name] % 4 == 0 for name in LOCAL)
    assert all(timings["predicted"][name]["seconds"] > 0 for name in LOCAL)
    rows = Page((tmp_path / "out/report.html").read_text()).table("Comparison of methods")
    found = {name: {head: value or 0 for head, (_, value) in row.items()} for name, row in rows.items()}
    assert 0 < found["diloco(4)"]["utilisation"] <= 1
    whole = found["diloco(4)"]["bytes per round"]
    assert whole == found["diloco(4)"]["largest exchange"] == pytest.approx(sent["dense"], rel=0.01)
    assert found["streaming(4,fragments=2)"]["bytes per round"] == pytest.approx(whole, rel=0.01)
    assert found["streaming(4,fragments=2)"]["largest exchange"] < 0.8 * whole
    assert found["streaming(4,fragments=2)"]["peak rate"] > 0


def test_simulated_workers_have_a_predicted_utilisation(tmp_path: Path) -> None:
    words = [
        "bench",
        "digits:mlp,width=16",
        "--epochs",
        "1",
        "--nodes",
        "4",
        "--simulate",
        "--network",
        "1mbit",
    ]
    assert (
        main([*words, "--device", "cpu", "--out", str(tmp_path / "out"), "--methods", "diloco(4),bf16"]) == 0
    )
    page = (tmp_path / "out/report.html").read_text()
    shares = {
        name: row["utilisation"]
        for name, row in Page(page).table("Comparison of methods").items()
        if name != "no exchange"
    }
    assert 0 < (shares["dense"][1] or 0) < (shares["diloco(4)"][1] or 0) < 1
    assert all("(predicted)" in text for text, _ in shares.values())
    narrow = {width: terminal_table(tmp_path / "out", width) for width in (80, 60, 30)}
    assert all(max(map(len, text.splitlines())) <= width for width, text in narrow.items())
    assert re.search(r"^method .*accuracy, % .*step time", narrow[80], re.M)
    missing = [head for head in EXCHANGE[1:] if not re.search(f"^method .*{head}", narrow[80], re.M)]
    assert missing
    assert all(head in narrow[80] and head in page for head in missing)


def timed(rank: int, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    models = {
        name: TimedModel(
            training_method(name),
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
            lambda net: net(x).square().mean(),
        )
        for name in ("dense", "streaming(6,fragments=2)", "diloco(5)")
    }
    steps = steps_per_round(models)
    assert steps["streaming(6,fragments=2)"] % 6 == steps["diloco(5)"] % 5 == 0
    for name, model in models.items():
        parts = model.time_parts(6 if name == "streaming(6,fragments=2)" else 5)
        step = parts.pop("step")
        assert sum(parts.values()) - parts["hidden"] <= 1.01 * step
        assert parts["exchange"] >= 0
    nbytes = 4 * 2 * (64 + 8)
    assert models["diloco(5)"].traffic()[0] == pytest.approx(nbytes / 5, rel=0.05)  # with padding
    local = models["streaming(6,fragments=2)"].local
    assert local is not None
    local.sync(models["streaming(6,fragments=2)"].inner)
    others = [p.detach().clone() for p in models["streaming(6,fragments=2)"].inner.parameters()]
    for p in others:
        torch.distributed.broadcast(p, 0)
    assert all(map(torch.equal, others, models["streaming(6,fragments=2)"].inner.parameters()))


def test_timed_models_exchange_in_rounds() -> None:
    in_processes(timed, 2)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))\n"
        "def example():\n"
        "    return torch.randn(64, 256), torch.zeros(64)\n"
        "def loss(output, target):\n"
        "    return output.square().mean()\n"
    )
    return str(path)


def test_local_steps_are_advised_where_they_are_much_faster(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor, "_MAX_STEPS", 5)
    link = nominal_link(LinkShape.parse("1mbit"), 4, 1)
    methods = ("bf16", "diloco(30)", "streaming(30,fragments=4)", "sparseloco(30)")
    slow = advise(load_workload(file), link, network="1mbit", nodes=4, methods=methods)
    assert slow.best.name.endswith("sparseloco(30)")
    assert "pf.LocalSteps(30, method=pf.compression.SparseLoCo(" in str(slow)
    assert "local steps: compare the quality" in str(slow)
    steps = {e.name: e.step for e in slow.estimates}
    assert steps["sparseloco(30)"] < steps["streaming(30,fragments=4)"] < steps["diloco(30)"] < steps["bf16"]
    assert all(e.interval is not None for e in slow.estimates)
    use = {e.name: e.utilisation or 0 for e in slow.estimates}
    assert use["dense"] < use["diloco(30)"] < use["sparseloco(30)"] <= 1
