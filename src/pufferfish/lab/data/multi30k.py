"""Multi30k, German and English: the raw sentences of the WMT16 multimodal task 1."""

from __future__ import annotations

from .dataset import Dataset, Download, Found

_HOME = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
#: Split, the name at home, and the SHA-256 of both texts.
_SPLITS = {
    "train": (
        "train",
        "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
        "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    ),
    "val": (
        "val",
        "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
        "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    ),
    "test2016": (
        "test_2016_flickr",
        "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
        "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    ),
}

DATASET = Dataset(
    name="multi30k",
    files={
        f"{split}.{language}": (f"{split}.{language}", f"{home}.{language}", f"{home}.{language}.gz")
        for split, (home, *_) in _SPLITS.items()
        for language in ("de", "en")
    },
    archives=("multi30k.tar.xz", "multi30k.tar.gz"),
    downloads=tuple(
        Download(url=f"{_HOME}/{home}.{language}.gz", file=f"{home}.{language}.gz", content=content)
        for home, *contents in _SPLITS.values()
        for language, content in zip(("de", "en"), contents, strict=True)
    ),
)


def pairs(files: dict[str, Found]) -> dict[str, tuple[list[str], list[str]]]:
    """Sentences of each split: German, and the same in English."""
    found = {}
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test2016")):
        german, english = (files[f"{name}.{language}"] for language in ("de", "en"))
        both = [[" ".join(s.split()) for s in f.text().rstrip("\n").split("\n")] for f in (german, english)]
        if len(both[0]) != len(both[1]):
            raise ValueError(
                f"{german.where} has {len(both[0]):,} lines and {english.where} has {len(both[1]):,}; "
                "they must be translations line by line"
            )
        for file, lines in zip((german, english), both, strict=True):
            if "" in lines:
                raise ValueError(f"{file.where}: line {lines.index('') + 1:,} is empty")
        found[split] = (both[0], both[1])
    return found
