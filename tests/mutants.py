"""Small wrong changes to the source, one at a time, each of which the tests of its part should notice.

    python tests/mutants.py                                  all mutants: killed or survived, with the changed line
    python tests/mutants.py --list                           only show them
    python tests/mutants.py --only 7                         only mutant 7
    python tests/mutants.py --at-least 0.8                   exit status 1 if a smaller share is killed
    python tests/mutants.py --source OLD/src --tests OLD/tests

A mutant is chosen by part, operator and seed among all places of the syntax trees, so that the list survives a rewrite: where
a file or folder moves, add it to PARTS. The source itself is never changed: tests run on a copy.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 0
EACH = 3  # mutants of a part

#: Part → globs inside the package, of which the first group that finds a file counts, and folders of tests.
PARTS: dict[str, tuple[list[list[str]], list[str]]] = {
    "optimizer state": ([["lowrank/carry.py"], ["optim/carry.py"], ["lowrank/rewrite.py"]], ["optim"]),
    "engine": ([["compression/engine.py"], ["compression/*.py"]], ["compression"]),
    "compression state": ([["compression/state.py"], ["compression/engine.py"], ["compression/*.py"]], ["compression"]),
    "checkpoint": ([["checkpoint/*.py"]], ["checkpoint"]),
    "local steps": ([["local/*.py"]], ["local"]),
    "plan": ([["planning/plan.py", "planning/entries.py", "planning/rules.py"], ["planning/*.py"]], ["planning"]),
    "factorize": (
        [["planning/svd.py", "lowrank/rewrite.py"]],
        ["planning", "lowrank"],
    ),
    "switch": ([["switching/*.py"]], ["switching"]),
    "DDP re-wrap": ([["distributed/job.py"], ["distributed/ddp.py"], ["distributed/*.py"]], ["distributed", "switching"]),
    "shared SVD": ([["lowrank/factors.py"], ["distributed/ddp.py", "distributed/workers.py"]], ["distributed", "switching"]),
}  # fmt: skip


# Operators: each yields a node, or two statements that follow each other, and the code that takes their place.

Change = tuple[list[ast.AST], str]
_FLIPPED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.Gt(), ast.Gt: ast.Lt(), ast.LtE: ast.GtE(), ast.GtE: ast.LtE(), ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip


def sign(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        sides = (node.left, node.right)
        # texts and lists are added, too
        if not any(isinstance(x, ast.List | ast.Tuple | ast.ListComp) or _is_text(x) for x in sides):
            op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield [node], ast.unparse(ast.BinOp(node.left, op, node.right))


def index(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        is_slice = isinstance(node.slice, ast.Slice)
        for x in (node.slice.lower, node.slice.upper) if isinstance(node.slice, ast.Slice) else (node.slice,):
            try:
                number = ast.literal_eval(x) if x else None
                if type(number) is int:
                    yield [x], str(number + 1)
            except ValueError:
                if is_slice:
                    yield [x], f"({ast.unparse(x)}) + 1"


def omitted_call(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield [node], "pass"


def swapped(node: ast.AST) -> Iterator[Change]:
    """Two statements about the same objects, at least one of them a call; neither uses a name that the other assigns."""
    for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for pair in itertools.pairwise(block) if isinstance(block, list) else ():
            calls = [isinstance(x, ast.Expr) and isinstance(x.value, ast.Call) for x in pair]
            if not any(calls) or not all(isinstance(x, ast.Expr | ast.Assign | ast.AugAssign) for x in pair):
                continue
            (a, stored_a), (b, stored_b) = ((_names(x), _names(x, ast.Store)) for x in pair)
            if not (stored_a & b or stored_b & a) and a & b - {"self", "cls", "torch", "dist"}:
                yield list(pair), ""


def comparison(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield [node], ast.unparse(ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]], node.comparators))


def constant(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield [node], str(not node.value)
        elif isinstance(node.value, int | float):
            yield [node], repr(node.value + 1)


OPERATORS: list[Callable[[ast.AST], Iterator[Change]]] = [
    sign,
    index,
    omitted_call,
    swapped,
    comparison,
    constant,
]


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, context)}


def _is_text(node: ast.AST) -> bool:
    joined = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
    return (
        joined
        or isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


def places(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that a test could notice: no texts, annotations, errors, imports, or lines for CUDA only."""
    if _is_text(node) or isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.keyword) and node.arg in ("strict", "stacklevel"):
        return
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return
    if isinstance(node, ast.stmt) and not hasattr(node, "body") and "cuda" in ast.unparse(node):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("warnings.", "print")):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not list(places(node.value)):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child)


@dataclass(frozen=True)
class Mutant:
    """One change to one file of the package."""

    number: int
    part: str
    operator: str
    file: Path  # relative to the source
    line: int
    before: str
    after: str
    source: str  # of the whole file, changed
    tests: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.number:2} {self.part}, {self.operator}: {self.file}:{self.line}"
        return f"{where}\n   - {self.before}\n   + {self.after}"


def mutants(source: Path) -> list[Mutant]:
    """The same list for the same source. A part without a place for an operator gets the next operator."""
    found: list[Mutant] = []
    for part, (groups, tests) in PARTS.items():
        package = source / "pufferfish"
        matching = ([f for glob in group for f in sorted(package.glob(glob))] for group in groups)
        files = next((fs for fs in matching if fs), [])
        if not files:
            raise SystemExit(
                f"{part}: none of its files is there; add where it is now to PARTS in {__file__}"
            )
        draw, count = random.Random(f"{SEED} {part}"), len(found)
        for operator in draw.sample(OPERATORS, len(OPERATORS)):
            nodes = [(f, x) for f in files for x in places(ast.parse(f.read_text("utf-8")))]
            sites = [(f, change) for f, x in nodes for change in operator(x)]
            if sites and len(found) < count + EACH:
                file, change = draw.choice(sites)
                before, after, line, text = changed(file.read_text("utf-8"), *change)
                name, where = operator.__name__.replace("_", " "), file.relative_to(source)
                found.append(
                    Mutant(len(found) + 1, part, name, where, line, before, after, text, tuple(tests))
                )
    return found


def changed(text: str, nodes: list[ast.AST], code: str) -> tuple[str, str, int, str]:
    """Replace nodes by code (two statements: swap them). Returns old and new line, its number and the new text."""
    data = text.encode()
    starts = [0]
    for one in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(one))
    spans = [
        (starts[x.lineno - 1] + x.col_offset, starts[x.end_lineno - 1] + x.end_col_offset)  # type: ignore[attr-defined]
        for x in nodes
    ]
    if len(spans) == 2:
        (a, b), (c, d) = spans
        middle = data[c:d] + data[b:c] + data[a:b]
        start, end = a, d
    else:
        start, end = spans[0]
        middle = code.encode()
    new = data[:start] + middle + data[end:]
    first, last = data.rfind(b"\n", 0, start) + 1, data.find(b"\n", end)
    shown = data[first:last], new[first : last + len(new) - len(data)]
    before, after = (" ⏎ ".join(x.strip() for x in one.decode().splitlines()) for one in shown)
    ast.parse(new.decode())
    return before, after, nodes[0].lineno, new.decode()  # type: ignore[attr-defined]


# Running them


def run_tests(source: Path, tests: Path, folders: tuple[str, ...], limit: float | None) -> tuple[bool, float]:
    """Whether the tests of these folders pass within the limit, and the seconds they took."""
    paths = [str(tests / folder) for folder in folders if (tests / folder).is_dir()]
    if not paths:
        raise SystemExit(f"{tests}: it has none of the folders {', '.join(folders)}")
    options = [
        "-qx",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=-m 'not slow'",
        "-o",
        f"pythonpath={source} {tests}",
    ]
    environment = os.environ | {"PYTHONPATH": f"{source}:{tests}", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=tests.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        passed = process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        passed = False
    finally:
        if process.poll() is None:  # with the workers that it has started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return passed, time.monotonic() - start


def copied(source: Path, folder: str) -> Path:
    copy = Path(folder, "src")
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=HERE.parent / "src", help="the folder that has pufferfish"
    )
    parser.add_argument("--tests", type=Path, default=HERE)
    parser.add_argument("--only", type=int, metavar="N", help="number of one mutant")
    parser.add_argument("--list", action="store_true", help="do not run the tests")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE")
    arguments = parser.parse_args()
    source, tests = arguments.source.resolve(), arguments.tests.resolve()
    chosen = [m for m in mutants(source) if arguments.only in (None, m.number)]
    if arguments.list or not chosen:
        print(*chosen, sep="\n")
        return 0

    def baseline(one: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            passed, seconds = run_tests(copied(source, folder), tests, (one,), None)
        if not passed:
            raise SystemExit(f"the tests of {one} fail without a mutant")
        return seconds

    def killed(mutant: Mutant) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            copy = copied(source, folder)
            (copy / mutant.file).write_text(mutant.source, "utf-8")
            passed, seconds = run_tests(
                copy, tests, mutant.tests, 60 + 3 * sum(usual[f] for f in mutant.tests)
            )
        print(f"{mutant}\n   {'SURVIVED' if passed else 'killed'} in {seconds:.0f} s", flush=True)
        return not passed

    with ThreadPoolExecutor(2) as pool:
        folders = sorted({folder for mutant in chosen for folder in mutant.tests})
        usual = dict(zip(folders, pool.map(baseline, folders), strict=True))
        share = sum(pool.map(killed, chosen)) / len(chosen)
    print(f"killed {share:.0%} of {len(chosen)}")
    return 1 if share < arguments.at_least else 0


if __name__ == "__main__":
    sys.exit(main())
