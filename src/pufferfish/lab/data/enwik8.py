"""enwik8: the first 100,000,000 bytes of an English Wikipedia dump of 2006."""

import hashlib

from .dataset import DataFile, Dataset, Download

#: Published checksum of the unpacked file.
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"

DATASET = Dataset(
    name="enwik8",
    files={"enwik8": ("enwik8", "enwik8.gz")},
    archives=("enwik8.zip",),
    downloads=(
        Download(
            url="https://mattmahoney.net/dc/enwik8.zip",
            file="enwik8.zip",
            size=36_445_475,
            sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
    ),
)


def check_md5(file: DataFile, expected: str) -> bytes:
    """Return the content of `file`; ValueError if it is not the one that results are published for."""
    found = hashlib.md5(file.data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(
            f"{file.path}: {len(file.data):,} bytes with MD5 {found}, expected {expected}; "
            "download it again, or use the task text for another file"
        )
    return file.data
