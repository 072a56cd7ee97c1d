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
    """Commit of the working directory, followed by + if files have changed since, or by ? if that is unknown.

    Runs no program that the repository's configuration names: it may be a foreign one.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments],
            capture_output=True, text=True, timeout=10, check=True,
            env={**os.environ, "GIT_ALLOW_PROTOCOL": "none"},  # of a partial clone, missing objects would be fetched
        ).stdout  # fmt: skip

    try:
        # To compare a file, git runs its filter. Those of the user and of the system, such as LFS, may run.
        sections = git("config", "--show-scope", "--name-only", "--list", "-z").split("\0")
        if any(
            scope in ("local", "worktree") and name.startswith("filter.")
            for scope, name in zip(sections[::2], sections[1::2], strict=False)
        ):
            changed = "?"
        else:
            status = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
            changed = "+" if status else ""
        return git("rev-parse", "HEAD").strip() + changed
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
