"""Print the versions and the hardware that a bug report needs. No paths, host
names or user names are printed.
"""

import argparse
import os
import textwrap
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Packages that optional parts use.
PACKAGES = (
    "numpy", "safetensors", "rich", "argcomplete", "triton", "transformers", "accelerate", "lightning", "peft", "torchft",
    "pillow", "sacrebleu", "tensorboard", "tokenizers",
)  # fmt: skip
#: Environment variables with numbers or names that change speed or results.
VARIABLES = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> None:
    found = environment()
    indent = max(map(len, found)) + 2
    for name, value in found.items():
        lines = textwrap.wrap(value, 80 - indent, break_on_hyphens=False)
        print(f"{name:<{indent}}" + f"\n{'':<{indent}}".join(lines))


def environment() -> dict[str, str]:
    """Versions, hardware and backends, each as a short text."""
    import platform

    import torch
    import torch.distributed as dist

    from .. import __version__
    from ..lab.network import unavailable_reason
    from ..measure.run_log import hardware

    machine = hardware()
    built = [f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"]
    built += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "cudnn": torch.backends.cudnn.is_available(),
    }
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    packages = {name: _version(name) for name in PACKAGES}
    missing = [name for name, found in packages.items() if found is None]
    return {
        "pufferfish": __version__,
        "python": platform.python_version(),
        "system": system,
        "torch": f"{torch.__version__} ({', '.join(built)})",
        "cpu": f"{machine['cpu']}, {machine['cores']} cores, torch uses {machine['threads']}",
        "gpu": _gpus() or "none",
        "backends": ", ".join(name for name, there in backends.items() if there),
        "emulated networks": "unavailable" if unavailable_reason() else "available",
        "packages": ", ".join(f"{name} {found}" for name, found in packages.items() if found),
        "not installed": ", ".join(missing) or "–",
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        or "–",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> str:
    import torch

    def describe(device: Any) -> str:
        return f"{device.name} ({device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor})"

    names = [describe(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
