"""`avoid_broken_amx`: disables AMX in oneDNN if a virtual machine reports AMX but cannot execute it."""

import hashlib
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: oneDNN's environment variable, and the latest instruction set without AMX.
VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
# The smallest bf16 product that oneDNN computes with AMX tiles.
_PROBE = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64, dtype=torch.bfloat16))"


def avoid_broken_amx(cpuinfo: Path = Path("/proc/cpuinfo"), probe: str = _PROBE) -> str | None:
    """Set `ONEDNN_MAX_CPU_ISA` for this process and its children if bf16 products raise SIGILL.

    Runs `probe` in a subprocess, once for each CPU, kernel and torch; the result is cached in the user's cache
    folder. No check if the CPU does not list `amx_bf16` in `cpuinfo` or the variable is already set.
    Returns a message for the user if the variable was set.
    """
    if VARIABLE in os.environ or not cpuinfo.is_file():
        return None
    text = cpuinfo.read_text()
    if "amx_bf16" not in text.split():
        return None
    model = next((line for line in text.splitlines() if line.startswith("model name")), "")
    key = hashlib.sha256("\n".join((model, platform.release(), version("torch"), probe)).encode()).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "pufferfish" / f"amx-{key[:16]}"
    try:
        works = cache.read_text() == "works"
    except OSError:
        # Without the working folder, which may hold another torch.py; `-P` does that from Python 3.11 on.
        safe = f"import sys; sys.path[:] = filter(None, sys.path); {probe}"
        code = subprocess.run([sys.executable, "-c", safe], capture_output=True).returncode
        works = code != -signal.SIGILL
        if code in (0, -signal.SIGILL):  # else it is unknown: without memory, the kernel kills the probe
            _write_cache(cache, "works" if works else "broken")
    if works:
        return None
    os.environ[VARIABLE] = WITHOUT_AMX
    return f"AMX is reported by this CPU but does not work; running with {VARIABLE}={WITHOUT_AMX}"


def _write_cache(cache: Path, result: str) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        temporary.write_text(result)
        temporary.replace(cache)
    except OSError:
        pass  # without a cache, the next process repeats the check
