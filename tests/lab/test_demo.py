"""The demo: a bench with fixed settings, on an emulated network or, if that is not possible, on the loopback."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pufferfish.cli import demo, main
from pufferfish.lab.network import unavailable_reason
from pufferfish.lab.train import workers
from pufferfish.measure import read_run

REASON = unavailable_reason()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


@pytest.mark.slow
@needs_network
@pytest.mark.timeout(200)
def test_on_an_emulated_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_small_demo(tmp_path, monkeypatch, capsys)
    run = read_run(tmp_path / "out/runs/pufferfish/seed-0")
    assert run.link is not None
    assert (run.hosts, run.workers, run.link["asked"]) == (2, 2, demo.LINK)
    assert 100 < run.link["got_mbit"] < 201
    assert f"link: requested {demo.LINK}, measured " in shown.err
    assert f"2 workers on 2 hosts, {demo.LINK}" in shown.out
    assert "predicted for" not in shown.out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_without_a_network_steps_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "unavailable_reason", lambda: "namespaces are not allowed here")
    shown = run_small_demo(tmp_path, monkeypatch, capsys)
    assert f"{demo.LINK}: namespaces are not allowed here. Using the unshaped loopback" in shown.err
    rows = [line for line in shown.out.splitlines() if line.startswith(("dense ", "bf16 ", "pufferfish "))]
    assert len(rows) == 3
    assert all("s (predicted)" in row for row in rows)
    assert f"predicted for {demo.LINK}" in " ".join(shown.out.split())
    assert f"predicted for {demo.LINK}" in (tmp_path / "out/report.html").read_text()


@pytest.mark.slow
@needs_network
@pytest.mark.timeout(600)
def test_the_whole_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    shown = capsys.readouterr()
    assert "runs/demo/report.html: open it in a browser" in shown.out
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    accuracy = {
        m: read_run(tmp_path / f"runs/demo/runs/{m}/seed-0").results["accuracy"]
        for m in demo.demo_settings().methods
    }
    assert min(accuracy.values()) > 95


def run_small_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> pytest.CaptureResult[str]:
    """Run the demo with a smaller model, fewer epochs and two hosts."""
    small = dataclasses.replace(
        demo.demo_settings(), task="digits:mlp,width=16", epochs=1, nodes=2, rounds=1, methods=("pufferfish",)
    )
    monkeypatch.setattr(demo, "demo_settings", lambda: small)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    return capsys.readouterr()
