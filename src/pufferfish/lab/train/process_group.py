"""The processes of a job: joining them, each one's device, and how a user stops them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

#: In gloo's errors, which have no class of their own.
_LOST = ("gloo/transport", "timeout caused pair closure")


class Lost(RuntimeError):
    """Others of the job cannot be reached any more."""


@contextlib.contextmanager
def job(device: str, timeout: float | None = None) -> Iterator[int]:
    """How many processes: of the group there is, of one made as torchrun says and left afterwards, or alone.

    Args:
        timeout: seconds that they wait for one another; None: as long as torch does.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_world_size()
        return
    if "RANK" not in os.environ:
        yield 1
        return
    try:
        wait = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=wait)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"the workers do not meet at {where}: {str(error).splitlines()[0]}") from None
    try:
        yield dist.get_world_size()
    except RuntimeError as error:
        gone = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if gone or any(words in str(error) for words in _LOST):
            raise Lost(re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])) from error
        raise
    finally:
        dist.destroy_process_group()


def enough_gpus(device: str, workers: int) -> None:
    """Refuse more workers on this machine than it has GPUs: no two of them can share one.

    >>> enough_gpus("cpu", 1000)
    """
    there = torch.cuda.device_count() if device == "cuda" else workers
    if workers > there:
        raise ValueError(
            f"{workers} workers on {there} GPU{'s' * (there != 1)}: each needs its own; start fewer, or take --device cpu"
        )


def place(device: str) -> torch.device:
    """This process's device; the groups that it joins afterwards take it too.

    >>> place("cpu")
    device(type='cpu')
    """
    if device != "cuda":
        return torch.device(device)
    enough_gpus(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    told = os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or ""
    rank = int(told) if told.isdigit() else dist.get_rank() if dist.is_initialized() else 0
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def placed(model: nn.Module, device: torch.device | str) -> nn.Module:
    """The model there, in place, in the memory format that is fast on it.

    >>> placed(nn.Linear(2, 2), "cpu")
    Linear(in_features=2, out_features=2, bias=True)
    """
    model.to(device)
    if torch.device(device).type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C asks to stop, as SIGTERM does; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
