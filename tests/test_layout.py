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


#: Private words in the source that are no names of other packages, or of Python itself.
NOT_THEIRS = {
    "_ARGCOMPLETE", "_a_", "_asdict", "_exit", "_option_string_actions", "_per_", "_proj_weight", "_pufferfish_rebuilt",
    "_reverse", "_scaled_dot_product_",
}  # fmt: skip


def words() -> tuple[set[str], set[str]]:
    """All names that the source gives to something of its own, and all names and texts that it uses."""
    ours, used = set(NOT_THEIRS), set()
    for n in [n for path in sorted(SOURCE.rglob("*.py")) for n in ast.walk(ast.parse(path.read_text()))]:
        match n:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                ours.add(name)
            case ast.Name(id=name, ctx=ctx) | ast.Attribute(attr=name, ctx=ctx):
                (ours if isinstance(ctx, ast.Store) else used).add(name)
            case ast.Constant(value=str(name)):
                used.add(name)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                used.update([*module.split("."), *(alias.name for alias in names)])
    return ours, used


def test_private_names_of_other_packages_are_listed() -> None:
    ours, used = words()
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"`(_\w+)`", text.split("## Private names")[1].split("\n## ")[0]))
    theirs = {name for name in used - ours if re.fullmatch(r"_[A-Za-z]\w+", name)}
    assert sorted(theirs - listed) == [], "say in CONTRIBUTING.md what for, and why no public name does it"
    assert sorted(listed - used) == [], "they are gone; remove them from CONTRIBUTING.md"


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
