"""`process_group`: the torch.distributed group of a run."""

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ...distributed.workers import LostContact

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
