"""The workers of a run: starting them on this machine, their process group, their device, and the signals that stop them."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.workers import LostContact
from ..network import Hosts, Network, unavailable_reason
from .console import RELAYED, Console, OutputRelay

#: Seconds that workers have to save a checkpoint when they are stopped.
GRACE_SECONDS = 60.0


def launch_workers(command: Sequence[str], *, network: str | None, hosts: int, per_host: int) -> int:
    """Run `command` (a script, or "-m" and a module, with arguments) on all workers and show their messages.

    Ctrl-C and SIGTERM stop the workers after a checkpoint; a second one ends them at once. No process is left behind.

    Args:
        network: link between the hosts, such as "100mbit"; None: the loopback.
        per_host: workers on each host.

    Returns:
        Exit code: 0; 2 if the workers reject their input; 130 if they were stopped; 1 otherwise.
    """
    console = Console()
    relay = OutputRelay(console)
    reason = unavailable_reason() if network else None
    if reason:
        console.info(f"network {network}: {reason}. Using the unshaped loopback instead")
    emulated = Hosts(hosts) if network is None or reason else Network(hosts, network)
    try:
        with sigterm_as_sigint(), emulated as machines:
            link = None
            if hosts > 1 and network is None:
                console.info(
                    "the hosts share the unshaped loopback; use --network to shape their links, such as --network 100mbit"
                )
            if hosts > 1:
                measured = machines.measure()
                link = asdict(measured)
                console.info(f"link: {measured}")
            console.progress(f"starting {hosts * per_host} workers …")  # which import torch for some seconds
            launch = {"link": link, "hosts": hosts, "unshaped": network if reason else None}
            env = {RELAYED: json.dumps(launch)}
            code = machines.launch(command, per_host=per_host, env=env, write=relay, grace=GRACE_SECONDS)
    except KeyboardInterrupt:
        return 130
    if not code or relay.errors:
        return 2 if relay.errors else 0
    failure = relay.failure_reason
    if relay.failure_output:
        print(relay.failure_output, file=sys.stderr)
        failure = "a worker has failed, see above"
    console.info(f"{failure}; rerun the same command to resume from the last checkpoint")
    return 1


def launch_info() -> dict[str, Any]:
    """Return what `launch_workers` passed to this worker, {"link", "hosts", "unshaped"}; empty for other workers.

    "unshaped" is a network that could not be emulated.

    >>> launch_info()
    {}
    """
    return dict(json.loads(os.environ.get(RELAYED, "{}")))


#: Found in gloo's connection errors, which have no class of their own.
_GLOO_CONNECTION_ERRORS = ("gloo/transport", "timeout caused pair closure")


class WorkersUnreachable(RuntimeError):
    """Raised when the connection to other workers is lost."""


@contextlib.contextmanager
def process_group(device: str, timeout: float | None = None) -> Iterator[int]:
    """Yield the world size, joining a process group first where torchrun's environment asks for one.

    A group that is already initialized is used and left open. Without torchrun there is no group and the size is 1.

    Args:
        device: "cuda" selects NCCL, anything else gloo.
        timeout: seconds that workers wait for one another; None: torch's default.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_world_size()
        return
    if "RANK" not in os.environ:
        yield 1
        return
    try:
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"cannot join the other workers at {address}: {str(error).splitlines()[0]}") from None
    try:
        yield dist.get_world_size()
    except RuntimeError as error:
        lost = isinstance(error, LostContact | dist.DistNetworkError | dist.DistStoreError)
        if lost or any(text in str(error) for text in _GLOO_CONNECTION_ERRORS):
            raise WorkersUnreachable(re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])) from error
        raise
    finally:
        dist.destroy_process_group()


def check_gpu_count(device: str, workers: int) -> None:
    """Raise ValueError if this machine has fewer GPUs than workers; NCCL workers cannot share one.

    >>> check_gpu_count("cpu", 1000)
    """
    gpus = torch.cuda.device_count() if device == "cuda" else workers
    if workers > gpus:
        raise ValueError(
            f"{workers} workers on {gpus} GPU{'s' * (gpus != 1)}: each worker needs its own GPU; start fewer workers, "
            "or use --device cpu"
        )


def worker_device(device: str) -> torch.device:
    """Return this worker's device and, on CUDA, make it the current one.

    >>> worker_device("cpu")
    device(type='cpu')
    """
    if device != "cuda":
        return torch.device(device)
    check_gpu_count(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    text = os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or ""
    rank = int(text) if text.isdigit() else dist.get_rank() if dist.is_initialized() else 0
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def move_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move `model` in place, to channels-last on CUDA, and return it.

    >>> move_to_device(nn.Linear(2, 2), "cpu")
    Linear(in_features=2, out_features=2, bias=True)
    """
    model.to(device)
    if torch.device(device).type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def sigterm_as_sigint() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on ctrl-C. No effect outside the main thread."""
    return _handler(signal.SIGTERM, signal.default_int_handler)


def sigint_as_sigterm() -> contextlib.AbstractContextManager[None]:
    """Turn the first ctrl-C into SIGTERM, on which a `Checkpoint` saves; the second one raises KeyboardInterrupt."""

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)

    return _handler(signal.SIGINT, terminate)


@contextlib.contextmanager
def _handler(number: int, handle: Callable[[int, Any], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, previous)
