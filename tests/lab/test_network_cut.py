"""Links cut during a job: for a moment, and until its workers give up."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from on_hosts import on_hosts

from benchmark import benchmark
from processes import in_processes
from pufferfish.cli import main
from pufferfish.lab.network import Hosts, Network, emulate, unavailable_reason
from pufferfish.measure import read_run

if reason := unavailable_reason():
    pytest.skip(f"no emulated network: {reason}", allow_module_level=True)

faults = benchmark("faults")
cut = benchmark("cut")
JOB = faults.Job(steps=24, switch_at=9, every=4)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2, "100mbit") as network:
        yield network


def work(rank: int, size: int, folder: Path) -> None:
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        faults.work(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Result of the job without cuts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    faults.prepare(folder, JOB)
    in_processes(work, 2, folder)
    end = faults.ended(folder, 0, 0.0)
    assert (end.starts, end.steps, len(end.digests)) == (1, JOB.steps, 2)
    return end


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_cut_for_a_moment(network: Network, undisturbed: Any, tmp_path: Path) -> None:
    """During the switch, between two broadcasts: no progress meanwhile, no restart, bit-identical result."""
    assert cut.soon(network, tmp_path, JOB, undisturbed, cut.schedule(JOB, 2)[1:2])
    assert network.process_ids() == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_three_times(network: Network, undisturbed: Any, tmp_path: Path) -> None:
    """During a backward pass, the switch and a checkpoint."""
    assert cut.soon(network, tmp_path, JOB, undisturbed, cut.schedule(JOB, 2))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_until_all_workers_give_up(network: Network, undisturbed: Any, tmp_path: Path) -> None:
    """The agents wait for each other, one restart is enough, and the job resumes from the checkpoint."""
    assert cut.late(network, tmp_path, JOB, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_without_restarts(network: Network, undisturbed: Any, tmp_path: Path) -> None:
    assert cut.again(network, tmp_path, JOB, undisturbed)


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
    networks: list[Hosts] = []

    def emulated(*args: Any) -> Hosts:
        networks.append(emulate(*args))
        return networks[-1]

    def pull() -> None:
        Path("reached").open().close()  # named pipes: each side waits for the other
        networks[0].cut(1)
        Path("cut").open("w").close()

    monkeypatch.chdir(tmp_path)
    launcher = importlib.import_module("pufferfish.lab.train.launch_workers")
    monkeypatch.setattr(launcher, "emulate", emulated)
    Path("waits.py").write_text(TASK)
    os.mkfifo("reached")
    os.mkfifo("cut")
    words = ["train", "waits.py:Waits", "--epochs", "4", "--method", "pufferfish", "--save-every", "7", "--device", "cpu"]  # fmt: skip
    command = [*words, "--network", "100mbit", "--hosts", "2", "--timeout", "6", "--out", "run"]
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
    assert main([*words, "--workers", "2", "--simulate", "--out", "straight"]) == 0
    straight, again = read_run("straight"), read_run("run")
    for name in ("loss", "valid/accuracy"):
        resumed, expected = ([point[1:] for point in run.metrics[name]] for run in (again, straight))
        assert resumed == expected
