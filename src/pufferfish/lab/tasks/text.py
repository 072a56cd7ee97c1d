"""`Text`: a user's own text files, byte by byte or by a tokenizer, with a small GPT or Llama."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..data.dataset import DATA_VARIABLE, data_folder
from ..data.text import TextSplits, split_bytes, tokenize, vocabulary_size
from .gpt_task import GPTTask

#: The tokenizer without a file: each byte is a token.
BYTES = "bytes"


@dataclass(frozen=True)
class Text(GPTTask):
    """A text: the first 90 % are for training, the next 5 % for validation, the last 5 % for testing.

    By default, the data folder is the file or contains a single .txt file. `file` names one of several; if it is a pattern,
    the files that match are joined in the order of their names.

    >>> import torch
    >>> Text(d=64, layers=2, heads=2, context=32).build()(torch.zeros(1, 32, dtype=torch.long)).shape
    torch.Size([1, 32, 256])
    """

    name = "text"
    metric = "bits_per_byte"

    file: str = ""
    tokenizer: str = BYTES  # or the path of a tokenizer.json, which needs the package tokenizers

    @property
    def vocabulary(self) -> int:
        return 256 if self.tokenizer == BYTES else vocabulary_size(Path(self.tokenizer))

    def load(self, folder: Path | None) -> TextSplits:
        folder = data_folder(folder, self.name, "a text file, or a folder with one")
        paths = self._paths(folder)
        text = b"".join(path.read_bytes() for path in paths)
        source = str(paths[0] if len(paths) == 1 else folder / self.file)
        if self.tokenizer == BYTES:
            data, unit = split_bytes(text), "bytes"
        else:
            data, unit = tokenize(text, Path(self.tokenizer), source), "tokens"
        sizes = [data.size(split) for split in data.sizes]
        if min(sizes) <= self.context:
            raise ValueError(
                f"{source}: {sum(sizes):,} {unit} are too few; 5 % of them must be more than the context of {self.context}"
            )
        return data

    def _paths(self, folder: Path) -> list[Path]:
        if folder.is_file():
            return [folder]
        if self.file and (folder / self.file).is_file():
            return [folder / self.file]
        pattern = self.file.lstrip("/") or "*.txt"
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if self.file and not files:
            raise ValueError(f"text: file {self.file} not found in {folder}")
        if not self.file and len(files) != 1:
            found = f"{len(files)} text files" if files else "no .txt file"
            use = "--data FILE or text:file=NAME" + (", or text:file=*.txt for all of them" if files else "")
            raise ValueError(f"text: {folder} has {found}; use {use}")
        return files


def with_tokenizer(task: str, data: Path | None) -> str:
    """Add the tokenizer.json beside the text to the name of a `text` task that does not name a tokenizer.

    >>> with_tokenizer("text:d=64,tokenizer=bytes", Path("book"))
    'text:d=64,tokenizer=bytes'
    """
    name, _, options = task.partition(":")
    place = data or os.environ.get(DATA_VARIABLE)
    if name != "text" or "tokenizer=" in options or not place:
        return task
    path = (Path(place) if Path(place).is_dir() else Path(place).parent) / "tokenizer.json"
    if not path.is_file():
        return task
    if "," in str(path):
        raise ValueError(f"{path}: options of a task are separated by commas; move it to a path without one")
    return f"{task}{',' if options else ':'}tokenizer={path}"
