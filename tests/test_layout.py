"""Packages import only packages above them, and the library names neither the lab nor any architecture."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pufferfish"
#: The library's packages in the order of their imports: each may import itself and those before it.
PACKAGES = [
    "layers", "planning", "distributed", "lowrank", "compression", "switching", "checkpoint", "local", "measure",
    "integrations", "lab", "cli", "__main__",
]  # fmt: skip
#: A model of transformers that becomes low-rank is saved by the adapter from then on, which nobody had asked for before.
EXCEPTIONS = {("lowrank/rewrite.py", "integrations.pretrained")}
#: The same inside the lab.
LAB = ["models", "data", "network", "report", "tasks", "rivals", "train", "advise", "bench"]
ARCHITECTURES = r"resnet|vgg|bert|llama|whisper|unet|densenet|mobilenet|\bvit\b|\bgpt\b|\bt5\b"


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules inside `pufferfish` that a file imports, inside functions as well, as parts of their dotted names."""
    package = path.relative_to(SOURCE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - (node.level - 1)]
            parts = (*above, *(node.module or "").split(".")) if node.module else above
            yield from [(*parts, alias.name) for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pufferfish."):
            yield tuple((node.module or "").split(".")[1:])


def test_packages_import_only_packages_above_them() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts in (("__init__",), ("api",)):
            assert not any(name[0] == "lab" for name in imports(path))
            continue
        for name in imports(path):
            exception = ("/".join(parts) + ".py", ".".join(name)) in EXCEPTIONS
            if PACKAGES.index(name[0]) > PACKAGES.index(parts[0]) and not exception:
                wrong.append((path, ".".join(name)))
            inside = parts[0] == name[0] == "lab" and {parts[1], name[1]} <= set(LAB)
            if inside and LAB.index(name[1]) > LAB.index(parts[1]):
                wrong.append((path, ".".join(name)))
    assert wrong == []


def test_no_architecture_in_the_library() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] not in ("lab", "cli"):
            code = ast.unparse(ast.parse(path.read_text()))  # comments may say where a layer comes from
            without_texts = re.sub(r'"""(.*?)"""|\'(.*?)\'', "", code, flags=re.DOTALL)
            if names := re.findall(ARCHITECTURES, without_texts, re.IGNORECASE):
                found[path] = names
    assert found == {}


@pytest.mark.slow
def test_the_tests_are_collected_without_the_files_beside_them(tmp_path: Path) -> None:
    """Beside an installed wheel there are neither pages nor benchmarks."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
