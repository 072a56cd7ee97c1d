"""The text task with a tokenizer: tokens as the tokenizers package gives them, kept in a cache; bits per byte."""

from __future__ import annotations

import json
import math
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pufferfish.cli import main
from pufferfish.lab.data import text as text_module
from pufferfish.lab.data.text import split_characters, tokenize, vocabulary_size
from pufferfish.lab.tasks import find_task
from pufferfish.lab.tasks.find_task import with_tokenizer
from pufferfish.measure import read_run

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SMALL = "d=8,layers=1,heads=2,context=8,dropout=0"
TEXT = "".join(random.Random(0).choices(["über ", "the ", "then\n", "\n\n", "日本 "], k=600))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PUFFERFISH_DATA", raising=False)
    return tmp_path / "cache" / "pufferfish"


def byte_level(path: Path, size: int = 275) -> Path:
    """A tokenizer without loss, which also asks for truncation, padding and a special token in front."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(path))
    return path


def words(path: Path) -> Path:
    """A tokenizer that knows two words only."""
    model = tokenizers.models.WordLevel({"<unk>": 0, "the": 1, "then": 900}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def tokens(data: Any) -> dict[str, list[int]]:
    return {split: data.on(split, "cpu")[0].tolist() for split in ("train", "valid", "test")}


def reference(path: Path) -> dict[str, list[int]]:
    """Each split, encoded whole."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = {split: part.decode() for split, part in split_characters(TEXT.encode()).items()}
    return {split: tokenizer.encode(text, add_special_tokens=False).ids for split, text in texts.items()}


def test_the_tokens_are_those_of_the_package(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it loses nothing
        data = tokenize(TEXT.encode(), path, "it")
    assert tokens(data) == reference(path)
    assert data.on("train", "cpu")[0].dtype == torch.int16
    assert data.sizes == {split: len(part) for split, part in split_characters(TEXT.encode()).items()}
    assert vocabulary_size(path) == 275
    assert vocabulary_size(words(tmp_path / "words.json")) == 901  # ids have gaps


def test_long_texts_are_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_PART", 50)
    monkeypatch.setattr(text_module, "_PARTS", 3)
    path = byte_level(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    for split, part in split_characters(TEXT.encode()).items():
        ids = tokens(tokenize(TEXT.encode(), path, "it"))[split]
        assert tokenizer.decode(ids) == part.decode()


def test_the_cache(tmp_path: Path, cache: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    expected = reference(path)
    assert tokens(tokenize(TEXT.encode(), path, "it")) == expected
    (file,) = cache.iterdir()

    # It is used: a marked file is what the next call returns.
    save_file({name: x + 1 for name, x in load_file(file).items()}, file)
    assert tokens(tokenize(TEXT.encode(), path, "it")) == {s: [i + 1 for i in x] for s, x in expected.items()}

    # A damaged file is not, and is replaced.
    file.write_bytes(file.read_bytes()[:100])
    assert tokens(tokenize(TEXT.encode(), path, "it")) == expected
    assert {name: x.tolist() for name, x in load_file(file).items()} == expected

    # Another tokenizer or another text has another file.
    byte_level(path, size=265)
    assert tokens(tokenize(TEXT.encode(), path, "it")) == reference(path) != expected
    tokenize(TEXT.encode() + b"x", path, "it")
    assert len(list(cache.iterdir())) == 3


def test_without_a_writable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    path = byte_level(tmp_path / "tokenizer.json")
    assert tokens(tokenize(TEXT.encode(), path, "it")) == reference(path)


def test_bits_per_byte_of_tokens(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "it.txt").write_text(TEXT)
    task: Any = find_task(f"text:{SMALL},tokenizer={path}")
    data, model = task.load(tmp_path), task.build()
    assert model.embedding.num_embeddings == 275
    found = task.evaluate(model, data, "test")
    text = split_characters(TEXT.encode())["test"]
    expected = found["loss"] * len(reference(path)["test"]) / len(text) / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(expected)


def test_a_tokenizer_that_loses_something(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"words\.json: decoding its tokens does not give the text back"):
        tokenize(TEXT.encode(), words(tmp_path / "words.json"), "it")


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = byte_level(tmp_path / "tokenizer.json")
    bad, empty, text = (tmp_path / name for name in ("bad.json", "empty.json", "it.txt"))
    bad.write_text("{}")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(empty))
    text.write_text(TEXT)
    for path, says in {
        bad: "bad.json: not a usable tokenizer.json",
        empty: "empty.json: not a usable tokenizer.json .it has no tokens",
        tmp_path / "none.json": "none.json: no such file",
    }.items():
        with pytest.raises(ValueError, match=says) as raised:
            find_task(f"text:tokenizer={path}").load(text)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"it\.txt: .* tokens are too few; .* context of 256"):
        find_task(f"text:tokenizer={good}").load(text)
    text.write_bytes(b"\xff" * 1000)
    with pytest.raises(ValueError, match=r"it\.txt: not UTF-8 text \(invalid byte 0\)"):
        find_task(f"text:tokenizer={good}").load(text)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text_module._parse_tokenizer.cache_clear()
    text.write_text(TEXT)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        find_task(f"text:tokenizer={good}").load(text)


def test_a_tokenizer_beside_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it.txt").write_text(TEXT)
    assert with_tokenizer("text", tmp_path) == "text"
    path = byte_level(tmp_path / "tokenizer.json")
    for place in (tmp_path, tmp_path / "it.txt"):
        assert with_tokenizer("text", place) == f"text:tokenizer={path}"
        assert with_tokenizer("text:llama,d=8", place) == f"text:llama,d=8,tokenizer={path}"
    assert with_tokenizer("text", None) == "text"
    monkeypatch.setenv("PUFFERFISH_DATA", str(tmp_path))
    assert with_tokenizer("text", None) == f"text:tokenizer={path}"
    for other in ("text:tokenizer=bytes", "enwik8", "own.py:text"):
        assert with_tokenizer(other, tmp_path) == other
    (tmp_path / "a,b").mkdir()
    byte_level(tmp_path / "a,b" / "tokenizer.json")
    with pytest.raises(ValueError, match="separated by commas"):
        with_tokenizer("text", tmp_path / "a,b")


def test_the_commands_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "it.txt").write_text(TEXT)
    path = byte_level(tmp_path / "tokenizer.json")
    more = ["--data", str(tmp_path), "--epochs", "2", "--batch", "8", "--device", "cpu"]
    assert main(["train", f"text:{SMALL}", *more, "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    run = read_run(tmp_path / "run")
    assert f"test bits per byte {run.results['bits_per_byte']:.4f}, " in printed.out
    assert f", validation bits per byte {run.metrics['valid/bits_per_byte'][-1][2]:.4f}, " in printed.err
    assert f"tokenizer='{path}'" in run.settings["task"]
    assert (run.settings["measure"], run.settings["higher"]) == ("bits_per_byte", False)

    bench = ["bench", f"text:{SMALL}", *more, "--methods", "pufferfish", "--rounds", "1"]
    assert main([*bench, "--out", str(tmp_path / "bench")]) == 0
    assert "bits per byte" in capsys.readouterr().out
    page = (tmp_path / "bench" / "report.html").read_text()
    assert "Lower bits per byte is better." in page
    assert "validation bits per byte" in page
    assert str(path) in json.loads((tmp_path / "bench" / "bench.json").read_text())["task"]
