"""`TINY`: tasks with tiny data in the official formats, and tiny models."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from pufferfish.lab.models import VGG19, resnet18, resnet50
from pufferfish.lab.tasks import Task, find_task
from pufferfish.lab.tasks.language import Enwik8


@dataclass(frozen=True)
class Tiny:
    """A task with a function that writes tiny data; `build` replaces the task's model where that is large."""

    task: Task
    write: Callable[[Path], object] = lambda folder: None
    build: Callable[[], nn.Module] | None = None
    rows: int = 0  # batch dimension

    def model(self) -> nn.Module:
        return (self.build or self.task.build)()


def cifar10(folder: Path, records: int = 16) -> Path:
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        rows = rng.integers(0, 256, (records, 3073), np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / f"{name}.bin")
    return folder


def wikitext2(folder: Path) -> Path:
    words = ["a", "b", "c", "d", "e", "f", "<unk>"]
    for split, lines in (("train", 60), ("valid", 12), ("test", 15)):
        pick = random.Random(split)
        text = [" " + " ".join(pick.choices(words, k=7)) + " \n" for _ in range(lines)]
        (folder / f"{split}.txt").write_text("".join(text))
    return folder


def multi30k(folder: Path) -> Path:
    nouns = {"Hund": "dog", "Mann": "man", "Baum": "tree", "Ball": "ball"}
    for name, lines in (("train", 40), ("val", 9), ("test2016", 7)):
        pick = random.Random(name)
        pairs = [pick.choices(list(nouns), k=pick.randint(1, 3)) for _ in range(lines)]
        for language, words in (("de", [[f"ein {x}" for x in p] for p in pairs]), ("en", [[f"a {nouns[x]}" for x in p] for p in pairs])):  # fmt: skip
            (folder / f"{name}.{language}").write_text("".join(f"{', '.join(w)}.\n" for w in words))
    return folder


def text(folder: Path) -> Path:
    pick = random.Random(0)
    (folder / "some.txt").write_text("".join(pick.choices("abcd ", k=900)))
    return folder


def enwik8(folder: Path) -> Path:
    (folder / "enwik8").write_bytes(ENWIK8)
    return folder


ENWIK8 = bytes(random.Random(0).choices(b"<page>\n \xc3\xa4", k=1800))


class TinyEnwik8(Enwik8):
    """The task for a file of 1,800 bytes."""

    md5 = hashlib.md5(ENWIK8).hexdigest()


def imagefolder(folder: Path) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20 + i, 30, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    return folder


TINY = {
    "digits": Tiny(find_task("digits:width=2")),
    "digits:mlp": Tiny(find_task("digits:mlp,width=2")),
    "cifar10": Tiny(find_task("cifar10:held=16"), cifar10, lambda: resnet18(channels=2)),
    "cifar10:vgg19": Tiny(find_task("cifar10:vgg19,held=16"), cifar10, lambda: VGG19(channels=2)),
    "wikitext2": Tiny(find_task("wikitext2:d=8,bptt=5,dropout=0"), wikitext2, rows=1),
    "wikitext2:gpt": Tiny(find_task("wikitext2:gpt,d=8,layers=1,heads=2,context=6,dropout=0"), wikitext2),
    "multi30k": Tiny(
        find_task("multi30k:d=8,layers=1,heads=2,hidden=8,vocabulary=60,beam=2,dropout=0"), multi30k
    ),
    "text": Tiny(find_task("text:d=8,layers=1,heads=2,context=8,dropout=0"), text),
    "text:llama": Tiny(find_task("text:llama,d=8,layers=1,heads=2,context=8,dropout=0"), text),
    "enwik8": Tiny(TinyEnwik8(d=8, layers=1, heads=2, context=8, epoch_tokens=800), enwik8),
    "imagefolder": Tiny(
        find_task("imagefolder:classes=2,size=32,held=0.1"),
        imagefolder,
        lambda: resnet50(classes=2, channels=2),
    ),
}
