"""The demo: a bench with fixed settings, on an emulated network or, where there can be none, on the loopback."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pufferfish.cli import main
from pufferfish.lab.bench import demo
from pufferfish.lab.bench import run_on_hosts as start
from pufferfish.lab.network import why_not
from pufferfish.measure import read

REASON = why_not()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")


@needs_network
@pytest.mark.timeout(200)
def test_on_an_emulated_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = told(tmp_path, monkeypatch, capsys)
    run = read(tmp_path / "out/runs/pufferfish/seed-0")
    assert run.link is not None
    assert (run.hosts, run.workers, run.link["asked"]) == (2, 2, demo.LINK)
    assert 100 < run.link["got_mbit"] < 201
    assert f"link: asked {demo.LINK}, got " in shown.err
    assert f"2 workers on 2 hosts, {demo.LINK}" in shown.out
    assert "predicted for" not in shown.out


@pytest.mark.timeout(200)
def test_without_a_network_steps_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "why_not", lambda: "nobody may make namespaces here")
    shown = told(tmp_path, monkeypatch, capsys)
    assert f"{demo.LINK}: nobody may make namespaces here. The plain loopback takes its place" in shown.err
    rows = [line for line in shown.out.splitlines() if line.startswith(("dense ", "bf16 ", "pufferfish "))]
    assert len(rows) == 3
    assert all("s predicted" in row for row in rows)
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
        m: read(tmp_path / f"runs/demo/runs/{m}/seed-0").results["accuracy"] for m in demo.asked().methods
    }
    assert min(accuracy.values()) > 95


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> pytest.CaptureResult[str]:
    """What the same demo says with a smaller model, shorter and on two hosts."""
    small = dataclasses.replace(
        demo.asked(), task="digits:mlp,width=16", epochs=2, hosts=2, rounds=2, methods=("pufferfish",)
    )
    monkeypatch.setattr(demo, "asked", lambda: small)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    return capsys.readouterr()
