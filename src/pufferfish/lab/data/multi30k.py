"""Multi30k, German and English: the raw sentences of the WMT16 multimodal task 1."""

from .dataset import DataFile, Dataset, Download

_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
#: Original file names by split, and SHA-256 of the text by original file.
_STEMS = {"train": "train", "val": "val", "test2016": "test_2016_flickr"}
_CHECKSUMS = {
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
}

DATASET = Dataset(
    name="multi30k",
    files={
        f"{split}.{language}": (f"{split}.{language}", f"{stem}.{language}", f"{stem}.{language}.gz")
        for split, stem in _STEMS.items()
        for language in ("de", "en")
    },
    archives=("multi30k.tar.xz", "multi30k.tar.gz"),
    downloads=tuple(
        Download(url=f"{_URL}/{file}.gz", file=f"{file}.gz", content_sha256=checksum)
        for file, checksum in _CHECKSUMS.items()
    ),
)


def read_sentences(files: dict[str, DataFile]) -> dict[str, tuple[list[str], list[str]]]:
    """Sentences of each split, German and English, aligned."""
    splits = {}
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test2016")):
        german, english = (files[f"{name}.{language}"] for language in ("de", "en"))
        source, target = (
            [" ".join(s.split()) for s in f.text().rstrip("\n").split("\n")] for f in (german, english)
        )
        if len(source) != len(target):
            raise ValueError(
                f"{german.path} has {len(source):,} lines and {english.path} has {len(target):,}; "
                "they must be translations line by line"
            )
        for file, lines in ((german, source), (english, target)):
            if "" in lines:
                raise ValueError(f"{file.path}: line {lines.index('') + 1:,} is empty")
        splits[split] = (source, target)
    return splits
