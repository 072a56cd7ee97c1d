"""The AMX check runs once if the CPU lists AMX, and disables AMX if it raises SIGILL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pufferfish.cli.amx import VARIABLE, avoid_broken_amx

DIES = (
    "import os, signal, pathlib; pathlib.Path({!r}).open('a').write('x'); os.kill(os.getpid(), signal.SIGILL)"
)


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that monkeypatch restores it after the test
    monkeypatch.delenv(VARIABLE)
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: some CPU\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    return file


def test_broken_amx(cpuinfo: Path, tmp_path: Path) -> None:
    """The probe runs once; later processes read the cached result."""
    tries = tmp_path / "tries"
    for _ in range(2):
        line = avoid_broken_amx(cpuinfo, DIES.format(str(tries)))
        assert (
            line == f"AMX is reported by this CPU but does not work; running with {VARIABLE}=AVX512_CORE_FP16"
        )
        assert os.environ.pop(VARIABLE) == "AVX512_CORE_FP16"
    assert tries.read_text() == "x"


def test_working_amx(cpuinfo: Path) -> None:
    assert avoid_broken_amx(cpuinfo, "pass") is None
    assert avoid_broken_amx(cpuinfo, "pass") is None  # from the cache
    assert VARIABLE not in os.environ


def test_no_check_without_need(cpuinfo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = tmp_path / "tries"
    assert avoid_broken_amx(tmp_path / "missing", DIES.format(str(tries))) is None
    plain = tmp_path / "plain"
    plain.write_text("flags\t\t: fpu avx512f\n")
    assert avoid_broken_amx(plain, DIES.format(str(tries))) is None
    monkeypatch.setenv(VARIABLE, "ALL")
    assert avoid_broken_amx(cpuinfo, DIES.format(str(tries))) is None
    assert not tries.exists()


def test_a_torch_of_the_working_folder_is_not_imported(
    cpuinfo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may run anywhere, also in a folder of somebody else's files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "torch.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.chdir(folder)
    assert avoid_broken_amx(cpuinfo, "import torch; torch.ones(1)") is None
    assert not (folder / "imported").exists()
    assert next((tmp_path / "cache" / "pufferfish").iterdir()).read_text() == "works"


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGKILL)", "raise MemoryError"])
def test_only_a_verdict_is_cached(cpuinfo: Path, tmp_path: Path, ends: str) -> None:
    """Not the death of a probe for which there was no memory: the next process tries again."""
    tries = tmp_path / "tries"
    probe = f"import os, signal; open({str(tries)!r}, 'a').write('x'); {ends}"
    for _ in range(2):
        assert avoid_broken_amx(cpuinfo, probe) is None
    assert VARIABLE not in os.environ
    assert tries.read_text() == "xx"
