"""Data in folders: read in every official form, with one-line errors for missing or damaged files."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from pufferfish.lab.data.dataset import Dataset, read_files
from pufferfish.lab.tasks import cifar10, find_task, language, multi30k


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUFFERFISH_DATA", raising=False)


WRITE = {
    "cifar10": tiny.cifar10,
    "wikitext2": tiny.wikitext2,
    "multi30k": tiny.multi30k,
    "enwik8": tiny.enwik8,
}
DATASETS = {d.name: d for d in (cifar10.DATASET, language.WIKITEXT2, multi30k.DATASET, language.ENWIK8)}


def problem(dataset: Dataset, folder: Path | None) -> str:
    with pytest.raises(ValueError) as raised:
        read_files(dataset, folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", DATASETS)
def test_every_place_and_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = DATASETS[name]
    source = tmp_path / "files"
    source.mkdir()
    WRITE[name](source)
    expected = {file: (source / file).read_bytes() for file in dataset.files}

    def same(folder: Path | None) -> bool:
        return {file: found.data for file, found in read_files(dataset, folder).items()} == expected

    assert same(source)
    for inside in (dataset.name, *dataset.folders):
        (tmp_path / "in" / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / inside).symlink_to(source)
        assert same(tmp_path / "in")
        (tmp_path / "in" / inside).unlink()
    for archive in dataset.archives:
        path = tmp_path / "packed" / archive
        path.parent.mkdir(exist_ok=True)
        if archive.endswith(".zip"):
            with zipfile.ZipFile(path, "w") as file:
                for each in expected:
                    file.write(source / each, f"some/{each}")
        else:
            with tarfile.open(path, f"w:{path.suffix[1:]}") as tar:
                tar.add(source, "some")
        assert same(path)
        monkeypatch.setenv("PUFFERFISH_DATA", str(path.parent))
        assert same(None)
        path.unlink()


def test_other_names_of_the_files(tmp_path: Path) -> None:
    tiny.multi30k(tmp_path)
    expected = multi30k.read_sentences(read_files(multi30k.DATASET, tmp_path))
    for words in ("de", "en"):
        plain = tmp_path / f"test2016.{words}"
        (tmp_path / f"test_2016_flickr.{words}.gz").write_bytes(gzip.compress(plain.read_bytes() + b"\n"))
        plain.unlink()
    assert multi30k.read_sentences(read_files(multi30k.DATASET, tmp_path)) == expected


def test_no_data(tmp_path: Path) -> None:
    assert "set --data or PUFFERFISH_DATA" in problem(cifar10.DATASET, None)
    assert "pufferfish fetch cifar10" in problem(cifar10.DATASET, None)
    assert "does not exist" in problem(cifar10.DATASET, tmp_path / "nowhere")
    error = problem(cifar10.DATASET, tmp_path)
    assert "data_batch_1.bin" in error
    assert "cifar-10-binary.tar.gz" in error
    assert f"`pufferfish fetch cifar10 --data {tmp_path}`" in error


def test_some_files_are_missing(tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    assert problem(cifar10.DATASET, tmp_path) == f"cifar10: data_batch_3.bin missing in {tmp_path}"


@pytest.mark.parametrize("kind", ["zip", "tar.xz"])
def test_broken_archives(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "files"
    source.mkdir()
    tiny.wikitext2(source)
    archive = tmp_path / {"zip": "wikitext-2-v1.zip", "tar.xz": "wikitext-2.tar.xz"}[kind]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in source.iterdir():
                file.write(path, path.name)
    else:
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(source, "it")
    whole = archive.read_bytes()
    for broken in (whole[: len(whole) // 2], b"not an archive", b""):
        archive.write_bytes(broken)
        assert str(archive) in problem(language.WIKITEXT2, tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    archive.write_bytes(flipped)
    assert str(archive) in problem(language.WIKITEXT2, tmp_path)


def test_an_archive_without_a_file(tmp_path: Path) -> None:
    tiny.wikitext2(tmp_path)
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as file:
        file.write(tmp_path / "train.txt", "train.txt")
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").unlink()
    assert problem(language.WIKITEXT2, tmp_path).endswith(
        f"valid.txt, test.txt missing in {tmp_path}/wikitext-2-v1.zip"
    )


def broken(task: str, folder: Path, file: str) -> str:
    """Error of loading the task; it must name the file."""
    with pytest.raises(ValueError) as raised:
        find_task(task).load(folder)
    error = str(raised.value)
    assert "\n" not in error
    assert str(folder / file) in error
    return error


def test_broken_files(tmp_path: Path) -> None:
    batch = tiny.cifar10(tmp_path) / "data_batch_2.bin"
    rows = batch.read_bytes()
    batch.write_bytes(rows[:-1])
    assert "49,167 bytes are not a multiple of the record size" in broken(
        "cifar10", tmp_path, "data_batch_2.bin"
    )
    batch.write_bytes(b"\x0a" + rows[1:])
    assert "label 10" in broken("cifar10", tmp_path, "data_batch_2.bin")
    batch.write_bytes(b"")
    broken("cifar10", tmp_path, "data_batch_2.bin")

    (tiny.wikitext2(tmp_path) / "valid.txt").write_bytes(b" a b \xff\n")
    assert "not UTF-8 text (invalid byte 5)" in broken("wikitext2", tmp_path, "valid.txt")
    (tmp_path / "train.txt").write_text(" ".join(map(str, range(33_278))))
    assert "33,279 different words" in broken("wikitext2", tmp_path, "train.txt")
    (tmp_path / "train.txt").write_text("a b\n")
    (tmp_path / "valid.txt").write_text("a z\n")
    assert "'z'" in broken("wikitext2", tmp_path, "valid.txt")

    german = tiny.multi30k(tmp_path) / "train.de"
    text = german.read_text()
    german.write_text(text + "noch einer\n")
    assert "41 lines" in broken("multi30k", tmp_path, "train.de")
    german.write_text("\n" + text.partition("\n")[2])
    assert "line 1 is empty" in broken("multi30k", tmp_path, "train.de")
    german.rename(tmp_path / "train.de.gz")
    assert "damaged" in broken("multi30k", tmp_path, "train.de.gz")


def test_text_files(tmp_path: Path) -> None:
    def error_of(task: str, folder: Path) -> str:
        with pytest.raises(ValueError) as raised:
            find_task(task).load(folder)
        return str(raised.value)

    assert "no .txt file" in error_of("text", tmp_path)
    tiny.text(tmp_path)
    assert "900 bytes are too few" in error_of("text", tmp_path)
    small = find_task("text:context=8")
    assert torch.equal(
        small.load(tmp_path).on("test", "cpu")[0], small.load(tmp_path / "some.txt").on("test", "cpu")[0]
    )
    (tmp_path / "other.txt").write_text("x" * 1000)
    assert "2 text files" in error_of("text", tmp_path)
    assert find_task("text:context=8,file=other.txt").load(tmp_path).size("train") == 900
    assert "file third.txt not found" in error_of("text:file=third.txt", tmp_path)


def test_text_files_that_are_joined(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("deep/c.txt", "c"), ("d[1].txt", "d")):
        (tmp_path / name).write_text(letter * 1000)
    for pattern, letters in {"*.txt": "abd", "**/*.txt": "abdc", "[a-b].txt": "ab", "d[1].txt": "d"}.items():
        data = find_task(f"text:context=8,file={pattern}").load(tmp_path)
        whole = torch.cat([data.on(split, "cpu")[0] for split in ("train", "valid", "test")])
        assert bytes(whole.tolist()[::1000]).decode() == letters
    with pytest.raises(ValueError, match=r"4,000 bytes are too few") as raised:
        find_task("text:file=**/*.txt").load(tmp_path)
    assert str(tmp_path / "**/*.txt") in str(raised.value)


def test_the_file_of_enwik8(tmp_path: Path) -> None:
    (tmp_path / "packed.d").mkdir()
    packed = tmp_path / "packed.d" / "enwik8.gz"
    packed.write_bytes(gzip.compress(tiny.ENWIK8))
    tiny.enwik8(tmp_path)
    for place in (tmp_path, tmp_path / "enwik8", tmp_path / "packed.d", packed):
        data = tiny.TINY["enwik8"].task.load(place)
        parts = [bytes(data.on(split, "cpu")[0].tolist()) for split in ("train", "valid", "test")]
        assert [len(part) for part in parts] == [1620, 90, 90]
        assert b"".join(parts) == tiny.ENWIK8
    assert "1,800 bytes with MD5" in broken("enwik8", tmp_path, "enwik8")
    (tmp_path / "enwik8").unlink()
    assert f"put enwik8 or enwik8.zip there, or run `pufferfish fetch enwik8 --data {tmp_path}`" in problem(
        language.ENWIK8, tmp_path
    )


def test_cifar10_images_are_the_records(tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    pixels, labels = cifar10.read_images(read_files(cifar10.DATASET, tmp_path), test=True)
    raw = (tmp_path / "test_batch.bin").read_bytes()
    for i in (0, 7):
        record = raw[3073 * i : 3073 * (i + 1)]
        assert labels[i] == record[0]
        for y, x, channel in np.ndindex(32, 32, 3):
            assert pixels[i, y, x, channel] == record[1 + 1024 * channel + 32 * y + x]


def test_wikitext2_words_are_numbered_as_they_appear(tmp_path: Path) -> None:
    for split, text in (("train", " \n = A = \n \n b <unk> A \n"), ("valid", " b new \n"), ("test", "A\n")):
        (tmp_path / f"{split}.txt").write_text(text)
    data = language.read_tokens(read_files(language.WIKITEXT2, tmp_path))
    # <eos> = A b <unk>
    assert data.on("train", "cpu")[0].tolist() == [0, 1, 2, 1, 0, 0, 3, 4, 2, 0]
    assert data.on("valid", "cpu")[0].tolist() == [3, 4, 0]
    assert data.on("test", "cpu")[0].tolist() == [2, 0]
