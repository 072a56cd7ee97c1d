"""A file imports what stands above it; the library knows neither the lab nor any architecture."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "pufferfish"
#: From the ground up. A room may import itself and what stands before it.
ROOMS = [
    "names", "layers", "svd", "rank", "budget", "profile", "timing", "cost", "plan", "table", "candidates",
    "planning", "fit", "change", "optim", "decay", "factorize", "when", "lr", "updates", "ranks", "ddp", "buckets", "exact", "compress", "testing",
    "average", "spread", "trial", "report", "fsdp", "job", "finite", "switch", "state", "files", "convert", "checkpoint",
    "local", "measure", "integrations", "lab", "cli", "__main__",
]  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms a file imports when it is loaded; what a function imports, or types need, does not count."""
    found = set()
    tree = ast.parse(path.read_text())
    depth = len(path.relative_to(PACKAGE).parts)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pufferfish."):
            found.add((node.module or "").split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_up(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        assert "lab" not in imported(path)
        return
    here = ROOMS.index(room(path))
    assert {name for name in imported(path) if ROOMS.index(name) > here} == set()


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) not in ("lab", "cli")], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_architecture_in_the_library(path: Path) -> None:
    code = ast.unparse(ast.parse(path.read_text()))  # comments may tell where a layer comes from
    names = r"resnet|vgg|bert|llama|whisper|unet|densenet|mobilenet|\bvit\b|\bgpt\b|\bt5\b"
    without_texts = re.sub(r'"""(.*?)"""|\'(.*?)\'', "", code, flags=re.DOTALL)
    assert re.findall(names, without_texts, re.IGNORECASE) == []
