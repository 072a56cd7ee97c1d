"""`avoid_broken_amx`: keep oneDNN from AMX instructions that a virtual machine announces but cannot execute."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: oneDNN's variable, and its newest instruction set without AMX.
VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
# The smallest bf16 product that oneDNN computes with AMX tiles; its exit code is negative if a signal ended it.
_PROBE = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64, dtype=torch.bfloat16))"


def avoid_broken_amx(cpuinfo: Path = Path("/proc/cpuinfo"), probe: str = _PROBE) -> str | None:
    """Set `ONEDNN_MAX_CPU_ISA` for this process and its children if bf16 products die of an illegal instruction.

    Tried once for each CPU, kernel and torch version, in a subprocess, and remembered in the user's cache folder.
    Nothing is tried where the CPU lists no `amx_bf16` or the variable is set already.

    Returns:
        A line for the user if the variable was set, else None.
    """
    if VARIABLE in os.environ or not cpuinfo.is_file():
        return None
    text = cpuinfo.read_text()
    if "amx_bf16" not in text.split():
        return None
    model = next((line for line in text.splitlines() if line.startswith("model name")), "")
    key = hashlib.sha256("\n".join((model, platform.release(), version("torch"), probe)).encode()).hexdigest()
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pufferfish" / f"amx-{key[:16]}"
    )
    try:
        works = cache.read_text() == "works"
    except OSError:
        works = subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode >= 0
        _remember(cache, "works" if works else "broken")
    if works:
        return None
    os.environ[VARIABLE] = WITHOUT_AMX
    return f"this CPU announces AMX but cannot execute it: running with {VARIABLE}={WITHOUT_AMX}"


def _remember(cache: Path, answer: str) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_name(f"{cache.name}.{os.getpid()}")
        unfinished.write_text(answer)
        unfinished.replace(cache)
    except OSError:
        pass  # no cache folder: the next process tries again
