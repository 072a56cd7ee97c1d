"""`TimeCache`: measured times, kept in the user's cache folder so that a layer is measured once per device and version."""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .json_file import parse_json

Times = tuple[float, ...]


class TimeCache:
    """Times by a key that describes what was measured, for one device.

    They are read from a JSON file in the user's cache folder and written to it by `save`, a file for each name of a GPU,
    version of torch and version of pufferfish. A file that cannot be read or written is ignored: the times are measured
    again.

    Args:
        gpu: Name of the GPU. None keeps times in memory only: those of a CPU depend on what else runs there.

    >>> cache = TimeCache(None)
    >>> cache.get("linear 8 × 8", lambda: (2.0, 1.0))
    (2.0, 1.0)
    >>> cache.get("linear 8 × 8", lambda: (5.0, 5.0))
    (2.0, 1.0)
    """

    def __init__(self, gpu: str | None) -> None:
        self.path = None if gpu is None else _path(gpu)
        self._times: dict[str, Times | None] = {**self._read()}
        self._new: dict[str, Times] = {}

    def get(self, key: str, measure: Callable[[], Times | None]) -> Times | None:
        """Return the times of `key`, from `measure` if they are unknown. None, for a failure, is not saved."""
        hashed = hashlib.sha256(key.encode()).hexdigest()[:32]
        if hashed not in self._times:
            times = self._times[hashed] = measure()
            if times is not None:
                self._new[hashed] = times
        return self._times[hashed]

    def save(self) -> None:
        """Add the new times to the file, by atomic replacement: several processes may do so."""
        if self.path is None or not self._new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._read() | self._new, indent=0)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=f"{self.path.name}.", delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
            Path(file.name).replace(self.path)
        except OSError:
            pass  # without a cache, the next plan measures again
        self._new = {}

    def _read(self) -> dict[str, Times]:
        if self.path is None:
            return {}
        try:
            data = parse_json(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        items = data.items() if isinstance(data, dict) else ()
        return {key: tuple(value) for key, value in items if _are_times(value)}


def _path(gpu: str) -> Path:
    from .. import __version__

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^\w.+-]+", "_", f"times-{gpu}-torch-{torch.__version__}-{__version__}.json")
    return caches / "pufferfish" / name


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(x, float | int) and math.isfinite(x) and x > 0 for x in value
    )
