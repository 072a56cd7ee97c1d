"""JSON files: errors name the file, for contents that are not JSON and for a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from torch import nn

import pufferfish as pf
from pufferfish.planning.json_file import read_json, write_text


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b'{"a": 1,\n oops}', r"x\.json: not valid JSON: Expecting property name .*line 2"),
        (b"", r"x\.json: not valid JSON: Expecting value"),
        (b"\xff\xfe\x00PK", r"x\.json: not valid JSON: "),
    ],
    ids=["syntax", "empty", "binary"],
)
def test_what_is_not_json(contents: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "x.json")


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    write_text(tmp_path / "x.json", '{"a": "é\\r\\n"}\r\n')
    assert (tmp_path / "x.json").read_bytes() == '{"a": "é\\r\\n"}\r\n'.encode()
    assert read_json(tmp_path / "x.json") == {"a": "é\r\n"}
    with pytest.raises(FileNotFoundError, match="nowhere/x"):
        read_json(tmp_path / "nowhere" / "x")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to("/dev/full")
    plan = pf.plan(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(
        OSError, match=r"No space left on device; free some space .*: '.*plan\.json'"
    ) as error:
        plan.save(tmp_path / "plan.json")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"No such file or directory: '.*nowhere/plan\.json'"):
        plan.save(tmp_path / "nowhere" / "plan.json")
