"""Measured times in the cache folder: kept for each GPU, merged between processes, and never the cause of an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pufferfish.planning.time_cache import TimeCache, Times


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pufferfish"


def never() -> Times:
    raise AssertionError("measured again")


def saved(gpu: str, **times: Times) -> TimeCache:
    cache = TimeCache(gpu)
    for key, value in times.items():
        assert cache.get(key, lambda value=value: value) == value  # type: ignore[misc]
    cache.save()
    return cache


def test_times_are_read_by_the_next_process(folder: Path) -> None:
    saved("GPU A/1", a=(2.0, 1.0), b=(3.0,))
    again = TimeCache("GPU A/1")
    assert again.get("a", never) == (2.0, 1.0)
    assert again.get("b", never) == (3.0,)
    assert TimeCache("GPU B").get("a", lambda: (5.0, 5.0)) == (5.0, 5.0)
    assert [file.suffix for file in folder.iterdir()] == [".json"]  # no temporary file is left


def test_processes_that_save_at_the_same_time_keep_the_times_of_both() -> None:
    first, second = TimeCache("GPU"), TimeCache("GPU")
    first.get("a", lambda: (1.0, 2.0))
    second.get("b", lambda: (3.0, 4.0))
    first.save()
    second.save()
    assert [TimeCache("GPU").get(key, never) for key in "ab"] == [(1.0, 2.0), (3.0, 4.0)]


def test_failures_are_not_saved() -> None:
    cache = TimeCache("GPU")
    assert cache.get("a", lambda: None) is None
    assert cache.get("a", never) is None
    cache.save()
    assert TimeCache("GPU").get("a", lambda: (1.0, 2.0)) == (1.0, 2.0)


def test_times_of_a_cpu_are_not_saved(folder: Path) -> None:
    cache = TimeCache(None)
    cache.get("a", lambda: (1.0, 2.0))
    cache.save()
    assert not folder.exists()


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1, 2]", b'{"a": 1}', b"\xff\xfe", b'{"%s": [0, NaN]}', b'{"%s": ["1", 2]}']
)
def test_a_damaged_file_is_measured_again(text: bytes) -> None:
    cache = saved("GPU", a=(2.0, 1.0))
    assert cache.path is not None
    (key,) = json.loads(cache.path.read_text())
    cache.path.write_bytes(text.replace(b"%s", key.encode()))
    assert TimeCache("GPU").get("a", lambda: (4.0, 3.0)) == (4.0, 3.0)
    saved("GPU", a=(4.0, 3.0))
    assert TimeCache("GPU").get("a", never) == (4.0, 3.0)


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    saved("GPU", a=(2.0, 1.0))
    assert TimeCache("GPU").get("a", lambda: (4.0, 3.0)) == (4.0, 3.0)
