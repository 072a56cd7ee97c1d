"""A link cut during a job until its workers give up."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from on_hosts import on_hosts

from pufferfish.cli import main
from pufferfish.lab.network import Network, unavailable_reason
from pufferfish.measure import read_run

if reason := unavailable_reason():
    pytest.skip(f"no emulated network: {reason}", allow_module_level=True)

#: Worker 1 waits in its 50th forward pass until its link is cut.
TASK = """
import os
import torch.distributed as dist
from dataclasses import dataclass
from pufferfish.lab.tasks.digits import Digits

passes = 0

@dataclass(frozen=True)
class Waits(Digits):
    model: str = "mlp"
    width: int = 16

    def loss(self, *args):
        global passes
        passes += 1
        if passes == 50 and dist.is_initialized() and dist.get_rank() == 1 and os.path.exists("reached"):
            open("reached", "w").close()
            open("cut").close()
            os.remove("reached")
        return super().loss(*args)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost worker gives one error line and leaves no process; the same command resumes to the undisturbed result."""
    networks: list[Network] = []

    def emulated(*args: Any) -> Network:
        networks.append(Network(*args))
        return networks[-1]

    def pull() -> None:
        Path("reached").open().close()  # named pipes: each side waits for the other
        networks[0].cut(1)
        Path("cut").open("w").close()

    monkeypatch.chdir(tmp_path)
    launcher = importlib.import_module("pufferfish.lab.train.workers")
    monkeypatch.setattr(launcher, "Network", emulated)
    Path("waits.py").write_text(TASK)
    os.mkfifo("reached")
    os.mkfifo("cut")
    words = ["train", "waits.py:Waits", "--epochs", "4", "--method", "pufferfish", "--save-every", "7", "--device", "cpu"]  # fmt: skip
    command = [*words, "--network", "100mbit", "--nodes", "2", "--timeout", "6", "--out", "run"]
    before = on_hosts(os.getpid())
    puller = threading.Thread(target=pull, daemon=True)
    puller.start()
    assert main(command) == 1
    puller.join()
    errors = capsys.readouterr().err.splitlines()
    assert "lost its connection to the other workers: " in errors[-1], errors
    assert errors[-1].endswith("; rerun the same command to resume from the last checkpoint")
    assert all(line.startswith(("link: ", "epoch ", "Switched ")) for line in errors[:-1]), errors
    assert on_hosts(os.getpid()) == before
    assert main(command) == 0
    assert main([*words, "--per-node", "2", "--simulate", "--out", "straight"]) == 0
    straight, again = read_run("straight"), read_run("run")
    for name in ("loss", "valid/accuracy"):
        resumed, expected = ([point[1:] for point in run.metrics[name]] for run in (again, straight))
        assert resumed == expected
