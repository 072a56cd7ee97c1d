"""What a run ran on: versions and hardware, for its records."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str | None]:
    """Of what a run's numbers depend on.

    >>> sorted(versions())
    ['commit', 'pufferfish', 'python', 'torch']
    """
    try:
        own: str | None = version("pufferfish-torch")
    except PackageNotFoundError:
        own = None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pufferfish": own,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of the code in this folder, with a + where files were changed since."""
    try:
        told = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()


def hardware() -> dict[str, Any]:
    """Of this process.

    >>> hardware()["cores"] >= 1
    True
    """
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "host": platform.node(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
