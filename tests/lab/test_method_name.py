"""Methods from text: what users type, and one clear line for whatever else they type."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pufferfish.compression import (
    DGC,
    Accordion,
    BFloat16,
    BlockInt8,
    BlockRandomK,
    Int4,
    Method,
    PowerSGD,
    RandomK,
    Settings,
    Simulated,
    TernGrad,
    Threshold,
    TopK,
)
from pufferfish.compression.check_compressor import gradients
from pufferfish.lab.method_name import compression_method, method_words, training_method, written

MINE = """
from __future__ import annotations

from dataclasses import dataclass

from neighbour import POWER
from pufferfish.compression import Method, Sum


@dataclass(frozen=True)
class Mine(Method):
    rank: int = POWER
    inner: Method | None = None

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError("Mine: rank must be 1 or more")

    def compress(self, x, ctx):
        return (yield Sum(x)) / ctx.size, x - x


class Plain(Method):
    rank: int = 2


def function():
    return Mine()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("POWER = 3")
    (tmp_path / "broken.py").write_text("1 / 0")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("bf16", BFloat16()),
        (" bf16 ( ) ", BFloat16()),
        ("powersgd(rank=2)", PowerSGD(rank=2)),
        ("topk(0.001)", TopK(0.001)),
        ("topk(100)", TopK(100)),
        ("threshold(1e-4)", Threshold(1e-4)),
        ("terngrad(clip=None)", TernGrad(clip=None)),
        ("blockrandomk(0.1, 'own', scale=True)", BlockRandomK(0.1, "own", scale=True)),
        (
            "accordion(powersgd(4), powersgd(rank=1), every=500)",
            Accordion(PowerSGD(4), PowerSGD(1), every=500),
        ),
        ("accordion(bf16, high=topk, every=2)", Accordion(BFloat16(), TopK(), every=2)),
        ("powersgd(4,start=5)", PowerSGD(4, start=5)),
        ("randomk(0.1)", RandomK(0.1)),
        ("int8(128)", BlockInt8(128)),
        ("int4", Int4()),
    ],
)
def test_what_users_type(text: str, method: Method) -> None:
    assert compression_method(text) == method


def test_what_is_written_is_read_back() -> None:
    for word, kind in method_words().items():
        method = Accordion(TopK(0.1), TopK(0.01), every=5) if kind is Accordion else kind()
        assert compression_method(written(method)) == method
        assert written(method).partition("(")[0] == word
    assert len(method_words()) == 24


@pytest.mark.parametrize("place", ["mine.py", "{}/mine.py", "mine"])
def test_methods_of_ones_own(folder: Path, place: str) -> None:
    place = place.format(folder)
    mine = compression_method(f"{place}:Mine(rank=2)")
    assert repr(mine) == "Mine(rank=2, inner=None)"
    assert repr(compression_method(f"{place}:Mine")) == "Mine(rank=3, inner=None)"
    assert compression_method(f"{place}:Mine(2)") == mine  # one class, however often it is named
    assert compression_method(f"{place}:Mine(1, powersgd(2))").inner == PowerSGD(2)  # type: ignore[attr-defined]
    assert compression_method(f"{place}:accordion(Mine(2), topk(0.1), every=7)").low == mine  # type: ignore[attr-defined]
    given = gradients(2)
    mean = Simulated(Settings(mine, smallest=0), 2).average(given)[0]
    assert mean["a.weight"].allclose((given[0]["a.weight"] + given[1]["a.weight"]) / 2)


def test_files_of_one_name_are_two(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "mine.py").write_text(MINE.replace("POWER\n    inner", "7\n    inner"))
    assert repr(compression_method("mine.py:Mine")).startswith("Mine(rank=3")
    assert repr(compression_method("other/mine.py:Mine")).startswith("Mine(rank=7")


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("powersdg(rank=2)", ValueError, r"no powersdg \(did you mean powersgd\?\); choose from .*topk"),
        ("PowerSGD(2)", ValueError, r"no PowerSGD \(did you mean powersgd\?\)"),
        ("topk-0.1", ValueError, r"there is no topk-0.1 \(did you mean topk"),
        ("zzz", ValueError, r"there is no zzz; choose from dense, "),
        (
            "powersgd(rnk=2)",
            ValueError,
            r"unexpected keyword argument 'rnk'; write powersgd\(rank=4, start=0",
        ),
        ("accordion(topk)", ValueError, r"missing .* 'high'; write accordion\(low, high, every\)"),
        ("topk(k=0.1, k=0.2)", ValueError, "k is given twice"),
        ("powersgd(rank=0)", ValueError, "PowerSGD: rank=0 is not an integer"),
        ("powersgd(start=-1)", ValueError, "PowerSGD: start=-1 is not an integer"),
        ("accordion(1, topk, 5)", TypeError, "low=1 is not a compression method"),
        ("topk(", ValueError, "write word"),
        ("topk(0.1", ValueError, "write word"),
        ("topk(0.1))", ValueError, "write word"),
        ("", ValueError, "write model"),
        ("topk(k=1 + 1)", ValueError, r"there is no 1 \+ 1"),
        ("topk(*[0.1])", ValueError, "there is no"),
        ("topk(k=method_words()[0])", ValueError, "write word"),
        ("__import__('os')", ValueError, "there is no __import__"),
        ("absent.py:Mine", ValueError, r"absent\.py: there is no such file"),
        ("absent.module:Mine", ValueError, "absent.module cannot be imported: ModuleNotFoundError"),
        ("broken.py:Mine", ValueError, r"broken\.py cannot be imported: ZeroDivisionError"),
        ("mine.py:Mien", ValueError, "did you mean Mine"),
        ("mine.py:Mine(rank=0)", ValueError, "Mine: rank must be 1 or more"),
        ("mine.py:Mine(rank='a')", TypeError, "not supported between"),
        ("mine.py:Plain", TypeError, "decorate it with @dataclass"),
        ("mine.py:function()", TypeError, "function is not a subclass of"),
        ("mine.py:POWER", TypeError, "POWER is not a subclass of"),
    ],
)
def test_errors_name_the_text_and_what_is_wrong(
    folder: Path, text: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        training_method(text)
    assert str(caught.value).startswith(f"method {text!r}: ")


def test_a_broken_file_can_be_mended(folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        compression_method("broken.py:Mine")
    (folder / "broken.py").write_text(MINE)
    assert repr(compression_method("broken.py:Mine(5)")).startswith("Mine(rank=5")


@given(st.text("topkdgc(0.1,k='own')=- \n:*[{\x00", max_size=40))
def test_any_text_is_a_method_or_an_error_for_users(text: str) -> None:
    before = os.getcwd(), len(DGC.__subclasses__())
    try:
        assert isinstance(compression_method(text), Method)
    except (ValueError, TypeError) as error:
        assert str(error)  # noqa: PT017
    assert before == (os.getcwd(), len(DGC.__subclasses__()))
