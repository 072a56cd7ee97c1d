"""`peak_memory`: the most memory that a run had in use."""

import contextlib
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak from here on, where the system supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Return peak bytes: of tensors on a GPU, else of this process. None where the system does not report it.

    >>> peak_memory(torch.device("cpu")) is None or peak_memory(torch.device("cpu")) > 10**6
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
