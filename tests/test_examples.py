"""The examples as a user runs them: own processes, small settings, results that count."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment(**settings: object) -> dict[str, str]:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"OMP_NUM_THREADS": "1", "PATH": search} | {k: str(v) for k, v in settings.items()}


def run(*command: object, cwd: Path, **settings: object) -> str:
    done = subprocess.run(
        [str(x) for x in command],
        env=environment(**settings),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"([\d.]+)% of the test digits right", output)]


@pytest.mark.parametrize("name", ["own_loop", "ema_and_clipping", "two_optimizers"])
def test_digits_are_learned_through_the_switch(name: str, tmp_path: Path) -> None:
    output = run(sys.executable, EXAMPLES / f"{name}.py", cwd=tmp_path)
    assert "Switched to low rank" in output
    found = accuracies(output)
    assert found
    assert min(found) >= 95, output


@pytest.mark.timeout(300)
def test_several_machines(tmp_path: Path) -> None:
    """Two launchers that meet over TCP, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{free.getsockname()[1]}"
    command = [EXAMPLES / "multi_node.sh", "2", head, EXAMPLES / "own_loop.py"]
    nodes = [
        subprocess.Popen(
            [str(x) for x in command], cwd=tmp_path, text=True, start_new_session=True,
            env=environment(EPOCHS=5), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(text.count("Switched to low rank") for text in outputs) == 1  # rank 0 tells
    found = [x for text in outputs for x in accuracies(text)]
    assert len(found) == 2
    assert found[0] == found[1]


def test_workers_that_train_alone(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", EXAMPLES / "local_steps.py"]
    output = run(*command, cwd=tmp_path)
    assert len(accuracies(output)) == 2
    assert min(accuracies(output)) >= 95, output
    sent, every = (int(x.replace(",", "")) for x in re.findall(r"[\d,]{4,}", output))
    assert sent * 70 < every  # a quarter of the bits, once in 20 steps, and what workers tell each other


def test_compressed_gradients(tmp_path: Path) -> None:
    output = run(*TORCHRUN, "--nproc-per-node", "2", EXAMPLES / "compressed.py", "runs", cwd=tmp_path)
    assert accuracies(output)[0] >= 95, output
    assert "31.6 times fewer bytes" in output


def test_sharded_training(tmp_path: Path) -> None:
    output = run(
        *TORCHRUN, "--nproc-per-node", "2", EXAMPLES / "fsdp2.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES=""
    )
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert "Switched to low rank at epoch 2" in output


def test_sharded_replicas(tmp_path: Path) -> None:
    output = run(*TORCHRUN, "--nproc-per-node", "4", EXAMPLES / "fsdp2_compressed.py", cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.2 * losses[0], output
    assert "3.92 times fewer bytes" in output


def test_a_loop_that_survives(tmp_path: Path) -> None:
    """Stopped by SIGTERM to one worker and started again it ends where the undisturbed run ends."""
    command = [*TORCHRUN, "--nproc-per-node", "2", EXAMPLES / "resumable.py"]
    straight = run(*command, "straight", cwd=tmp_path)
    stopped = subprocess.Popen(
        [str(x) for x in (*command, "stopped")], cwd=tmp_path, text=True, start_new_session=True,
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while not list(tmp_path.glob("stopped/*-step-*")):  # until it has come somewhere
            assert stopped.poll() is None, stopped.communicate()[0]
        workers = subprocess.run(
            ["pgrep", "-P", str(stopped.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(workers[-1]), signal.SIGTERM)
        output = stopped.communicate(timeout=120)[0]
    finally:
        if stopped.poll() is None:
            os.killpg(stopped.pid, signal.SIGKILL)
    assert stopped.returncode == 0, output
    assert "loss" not in output
    assert run(*command, "stopped", cwd=tmp_path) == straight
    assert "loss" in straight


def test_own_checkpoints_before_and_after_the_switch(tmp_path: Path) -> None:
    script = EXAMPLES / "own_checkpoint.py"
    straight = run(sys.executable, script, cwd=tmp_path, EPOCHS=6, FILE="straight.pt")
    for stop in (2, 4, 6):
        stopped = run(sys.executable, script, cwd=tmp_path, EPOCHS=stop, FILE="stopped.pt")
    assert stopped == straight


def test_fine_tuning(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "pretrained")
    output = run(sys.executable, EXAMPLES / "finetune.py", "pretrained", "tuned", cwd=tmp_path, STEPS=20)
    assert "as it is" in output
    assert "Switched to low rank at step 2" in output
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    names = transformers.GPT2LMHeadModel(config).state_dict().keys()
    assert again.state_dict().keys() == names


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
