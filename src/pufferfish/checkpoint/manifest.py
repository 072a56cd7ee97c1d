"""The manifest of a checkpoint: size and SHA-256 of every file, so that damage is detected."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lowrank.files import sha256, sync
from ..planning.json_file import read_json, write_text

MANIFEST = "manifest.json"
NOT_OURS = "damaged, or not written by pufferfish.Checkpoint"
_VERSION = 1


def file_record(file: Path) -> dict[str, Any]:
    """Flush `file` to disk and return its manifest entry: size in bytes and SHA-256."""
    sync(file)
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def write_manifest(folder: Path, files: Mapping[str, Any], world_size: int) -> None:
    """Write the manifest of `files` (name → `file_record`) and flush it to disk."""
    data = {"pufferfish checkpoint": _VERSION, "world": world_size, "files": dict(sorted(files.items()))}
    data["sha256"] = _digest(data)
    manifest = folder / MANIFEST
    write_text(manifest, json.dumps(data, indent=1) + "\n")
    sync(manifest)
    sync(folder)


def read_manifest(path: Path, contents: bool = True) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path` after checking every file against it.

    Args:
        contents: compare the SHA-256 of each file, not only its size.

    Raises:
        ValueError: if the checkpoint is damaged or has another format.
    """
    data = _read_intact(path)
    version = data.get("pufferfish checkpoint")
    if version != _VERSION:
        raise ValueError(
            f"{path / MANIFEST}: its format is {version}, but this version of pufferfish reads format "
            f"{_VERSION}"
        )
    try:
        files = [(path / name, record["bytes"], record["sha256"]) for name, record in data["files"].items()]
        ours = 0 < data["world"] <= len(files) and all(file.parent == path for file, _, _ in files)
    except (KeyError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{path / MANIFEST}: {NOT_OURS}")
    for file, expected, digest in files:
        if not file.is_file():
            raise ValueError(f"{file}: damaged, the file is missing")
        size = file.stat().st_size
        if size != expected:
            raise ValueError(f"{file}: damaged, {size:,} bytes instead of {expected}")
        if contents and sha256(file) != digest:
            raise ValueError(f"{file}: damaged, its SHA-256 differs from the one in {MANIFEST}")
    return data


def _read_intact(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`; ValueError if its own digest does not fit."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{path}: damaged, {MANIFEST} is missing")
    try:
        data: dict[str, Any] = read_json(manifest)
        intact = data["sha256"] == _digest({key: x for key, x in data.items() if key != "sha256"})
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{manifest}: {NOT_OURS}")
    return data


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
