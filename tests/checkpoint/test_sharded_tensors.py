"""Parts of a sharded tensor are assembled from the files of any number of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pufferfish.checkpoint.sharded_tensors import ShardReader

VALUES = torch.arange(1.0, 25.0).view(12, 2)


def write(folder: Path, rows: list[tuple[int, int]]) -> ShardReader:
    """Write a file for each worker, with its rows of VALUES."""
    files = []
    for worker, (start, end) in enumerate(rows):
        offsets = {"w": [start, 0]}
        files.append(folder / f"{worker}.safetensors")
        save_file({"w": VALUES[start:end].clone()}, files[-1], {"offsets": json.dumps(offsets)})
    return ShardReader(files)


def test_shards_that_every_replica_has_written(tmp_path: Path) -> None:
    reader = write(tmp_path, [(0, 6), (0, 6), (6, 12), (6, 12)])
    for start, end in ((0, 4), (4, 8), (8, 12), (0, 12)):
        part = (start, 0), (end - start, 2)
        assert torch.equal(reader.read("w", torch.float32, part), VALUES[start:end])


def test_a_shard_that_nobody_has_written(tmp_path: Path) -> None:
    reader = write(tmp_path, [(0, 6), (0, 6)])
    with pytest.raises(ValueError, match="w: 4 of 8 values are missing from the checkpoint"):
        reader.read("w", torch.float32, ((4, 0), (4, 2)))
