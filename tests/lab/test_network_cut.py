"""Cables pulled out of a running job: for a moment, and until its workers give up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_train import values

from benchmark import benchmark
from pufferfish.cli import main
from pufferfish.lab.network import Hosts, Network, emulate, why_not
from pufferfish.lab.network.clean import marked
from pufferfish.lab.train import launch_workers as start
from pufferfish.measure import read

if reason := why_not():
    pytest.skip(f"no emulated network: {reason}", allow_module_level=True)

faults = benchmark("faults")
cut = benchmark("cut")
JOB = faults.Job(steps=24, switch_at=9, every=4)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2, "100mbit") as network:
        yield network


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The job that nobody disturbs, on the loopback."""
    end = faults.launch(tmp_path_factory.mktemp("whole"), JOB, 2)
    assert (end.status, end.starts, end.steps) == (0, 1, JOB.steps)
    return end


@pytest.mark.timeout(120)  # the hang guard; what runs ends with the network
def test_out_for_a_moment(network: Network, whole: Any, tmp_path: Path) -> None:
    """In the switch, between two broadcasts: nothing moves, nobody restarts, the same bits."""
    assert cut.soon(network, tmp_path, JOB, whole, cut.schedule(JOB, 2)[1:2])
    assert network.running() == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_out_three_times(network: Network, whole: Any, tmp_path: Path) -> None:
    """In a backward pass, in the switch and in a checkpoint."""
    assert cut.soon(network, tmp_path, JOB, whole, cut.schedule(JOB, 2))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_out_until_all_give_up(network: Network, whole: Any, tmp_path: Path) -> None:
    """The agents wait for one another, one restart is enough, and the checkpoint brings the rest."""
    assert cut.late(network, tmp_path, JOB, whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_out_without_restarts(network: Network, whole: Any, tmp_path: Path) -> None:
    assert cut.again(network, tmp_path, JOB, whole)


def test_bad_restarts(network: Network) -> None:
    with pytest.raises(ValueError, match="-1 restarts: choose 0 or more"):
        network.launch(["x.py"], restarts=-1)


#: Rank 1 waits in its 50th pass until its cable is out.
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

    def loss(self, *given):
        global passes
        passes += 1
        if passes == 50 and dist.is_initialized() and dist.get_rank() == 1 and os.path.exists("reached"):
            open("reached", "w").close()
            open("cut").close()
            os.remove("reached")
        return super().loss(*given)
"""


def _ours() -> set[int]:
    """Processes of networks that this process has made."""
    return {pid for pid, mark in marked().items() if f":{os.getpid()}:" in mark}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what happened and what to do, nothing is left, and the same command ends as if nothing had been."""
    made: list[Hosts] = []

    def emulated(*asked: Any) -> Hosts:
        made.append(emulate(*asked))
        return made[-1]

    def pull() -> None:
        Path("reached").open().close()  # pipes: each side waits for the other
        made[0].cut(1)
        Path("cut").open("w").close()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "emulate", emulated)
    Path("waits.py").write_text(TASK)
    os.mkfifo("reached")
    os.mkfifo("cut")
    words = ["train", "waits.py:Waits", "--epochs", "4", "--method", "pufferfish", "--save-every", "7", "--device", "cpu"]  # fmt: skip
    command = [*words, "--network", "100mbit", "--hosts", "2", "--timeout", "6", "--out", "run"]
    before = _ours()
    puller = threading.Thread(target=pull, daemon=True)
    puller.start()
    assert main(command) == 1
    puller.join()
    errors = capsys.readouterr().err.splitlines()
    assert "has lost the others: " in errors[-1], errors
    assert errors[-1].endswith("; the same command goes on from the last checkpoint")
    assert all(line.startswith(("link: ", "epoch ", "Switched ")) for line in errors[:-1]), errors
    assert _ours() == before
    assert main(command) == 0
    assert main([*words, "--workers", "2", "--simulate", "--out", "straight"]) == 0
    straight, again = read("straight"), read("run")
    for name in ("loss", "valid/accuracy"):
        assert values(again, name) == values(straight, name)
