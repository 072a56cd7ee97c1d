"""`worker_device`: the device of this worker; models are moved to it in the memory format that is fast there."""

import os

import torch
import torch.distributed as dist
from torch import nn


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
