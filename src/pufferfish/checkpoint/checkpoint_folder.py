"""Checkpoint folders on disk: each appears whole or not at all, and is known to be whole when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lowrank.files import sha256, sync

MANIFEST = "manifest.json"
_VERSION = 1
_NAME = re.compile(r"(\d+)(-step-\d+)?")  # a running number first: it orders them whatever the steps say
_HIDDEN = re.compile(r"\.writing\.(.*)\.(\d+)\.[^.]+")  # host and process that write
_DEAD = 3600.0  # seconds without a change after which another machine's writer counts as dead


def saved(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.exists():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest(folder: Path, damaged: str) -> tuple[str, str] | None:
    """The newest whole checkpoint and its manifest's digest. A damaged one is an error, or passed over."""
    if damaged not in ("raise", "previous"):
        raise ValueError(f'damaged={damaged!r} is neither "raise" nor "previous"')
    paths = saved(folder)
    for path in reversed(paths):
        try:
            return str(path), check(path)["sha256"]
        except ValueError as error:
            if damaged == "raise":
                raise ValueError(f'{error}; damaged="previous" goes on from the one before') from None
            warnings.warn(f"{error}; going on from the one before", stacklevel=2)
    if paths:
        raise ValueError(f"{folder}: none of its {len(paths)} checkpoints is whole")
    return None


def begin(folder: Path) -> Path:
    """A hidden folder to write into. What dead writers left behind is removed first: it takes up room."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=_prefix(), dir=folder))
    fresh.chmod(0o755)
    return fresh


def record(file: Path) -> dict[str, Any]:
    """By what to know `file` again, once it is on disk."""
    file.chmod(0o644)  # safetensors lets nobody else read
    sync(file)
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def finish(fresh: Path, files: Mapping[str, Any], world: int, step: int | None, keep: int | None) -> Path:
    """Write the manifest, give the folder its name, and remove the oldest beyond `keep`."""
    data = {"pufferfish checkpoint": _VERSION, "world": world, "files": dict(sorted(files.items()))}
    data["sha256"] = _digest(data)
    manifest = fresh / MANIFEST
    manifest.write_text(json.dumps(data, indent=1) + "\n")
    for path in (manifest, fresh):
        sync(path)
    older = saved(fresh.parent)
    number = 1 + int(_NAME.fullmatch(older[-1].name)[1]) if older else 1  # type: ignore[index]
    made = fresh.with_name(f"{number:06d}" if step is None else f"{number:06d}-step-{step}")
    fresh.rename(made)
    sync(made.parent)
    for path in older[: max(len(older) + 1 - keep, 0)] if keep else []:
        hidden = path.with_name(f"{_prefix()}{path.name}")
        path.rename(hidden)  # so that none is ever seen half removed
        shutil.rmtree(hidden, ignore_errors=True)
    return made


def check(path: Path, contents: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, after comparing every file with it: its size, and its `contents`."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{path}: damaged, there is no {MANIFEST}")
    try:
        data: dict[str, Any] = json.loads(manifest.read_text())
        digest = data.pop("sha256")
        whole = digest == _digest(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{manifest}: damaged, or not written by pufferfish.Checkpoint")
    version = data["pufferfish checkpoint"]
    if version != _VERSION:
        raise ValueError(f"{manifest}: format {version}, this pufferfish reads {_VERSION}")
    for name, expected in data["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: damaged, the file is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{file}: damaged, {size:,} bytes instead of {expected['bytes']:,}")
        if contents and sha256(file) != expected["sha256"]:
            raise ValueError(f"{file}: damaged, its SHA-256 is not the one in {MANIFEST}")
    return data | {"sha256": digest}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _prefix() -> str:
    return f".writing.{socket.gethostname()}.{os.getpid()}."


def _abandoned(path: Path) -> bool:
    match = _HIDDEN.fullmatch(path.name)
    if not match:
        return False
    host, process = match[1], int(match[2])
    try:
        if host != socket.gethostname():
            return time.time() - path.stat().st_mtime > _DEAD
        if process == os.getpid():
            return True  # one write at a time: it is an earlier process that had our number
        os.kill(process, 0)
    except PermissionError:
        return False  # it lives, and is somebody else's
    except OSError:
        return True
    return False
