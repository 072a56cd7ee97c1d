"""Software versions and hardware of a run, for its log."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str | None]:
    """Versions of Python, torch and pufferfish, and the git commit of the working directory."""
    from .. import __version__

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pufferfish": __version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the working directory, followed by + if files have changed since; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "core.fsmonitor=false", *arguments]  # a program that a repository may name
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """CPU, cores, torch threads, GPU and host name of this process."""
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
