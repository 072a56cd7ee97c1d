"""The documentation: its code runs, its commands parse, its reference has every public name, its links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import as_torchrun, forked, free_port, in_processes, same_everywhere
from pufferfish.cli import COMMANDS, command_parser, main

DOCS = Path(__file__).parents[1] / "docs"
if not DOCS.is_dir():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
TEXTS = {"README.md": DOCS.parent / "README.md", "CONTRIBUTING.md": DOCS.parent / "CONTRIBUTING.md", **PAGES}
#: Pages whose code needs a process group, and its number of workers.
WORKERS = {
    "index.md": 1,
    "local_steps.md": 2,
    "concepts/error_feedback.md": 1,
    "concepts/exactness.md": 1,
    "how_to/fsdp2.md": 4,
    "how_to/other_numbers_of_workers.md": 2,
    "how_to/two_machines.md": 2,
    "tutorials/fine_tune.md": 2,
}
#: Pages whose code other tests run, and check the results of.
ELSEWHERE = {"lab.md", "compression.md", "elastic.md", "tutorials/cnn.md"}
FILE = re.compile(r"# (\w+\.py)\n")


def all_blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every block of code; of a diff, the code after it."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", TEXTS[page].read_text(), re.DOTALL | re.MULTILINE)
    after = (
        re.sub(r"^(-.*\n|[+ ])", "", code, flags=re.M) if kind == "diff" else code for kind, code in found
    )
    return [(kind, code) for (kind, _), code in zip(found, after, strict=True)]


def blocks(page: str, *kinds: str) -> list[str]:
    return [code for kind, code in all_blocks(page) if kind in kinds]


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python code of a page, from its first block to its last, in the current folder.

    A block that begins with `# name.py` is a file and is only written. A text right below code is what the code prints.
    The other names that pages use without
    defining them stand for the reader's own: a model, its optimizer, data and a loss.
    """
    torch.manual_seed(0)
    x, y = torch.randn(8, 64), torch.arange(8) % 4

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def held_out_loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    model = build_model()
    code = "\n".join(blocks(page, "python", "diff"))
    ddp = DDP(model) if re.search(r"\bddp\b", code) and WORKERS.get(page) else None
    user: dict[str, Any] = {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "pf": pf,
        "build_model": build_model,
        "model": model,
        "ddp": ddp,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": nn.functional.cross_entropy,
        "held_out_loss": held_out_loss,
        "x": x,
        "y": y,
        "batches": [(x, y)] * 2,
        "train_one_epoch": lambda model, optimizer: None,
        "epochs": 3,
        "steps": 6,
        "device": "cpu",
        "machines": 2,
        "per_machine": 1,
    }
    printed: str | None = None
    for number, (kind, code) in enumerate(all_blocks(page), start=1):
        if kind == "text" and printed is not None:
            assert [line.rstrip() for line in printed.splitlines()] == code.splitlines()
        printed = None
        if kind not in ("python", "diff"):
            continue
        if name := FILE.match(code):
            Path(name[1]).write_text(code)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as output:
            # Without the __future__ imports of this file.
            exec(compile(code, f"{page}, block {number}", "exec", dont_inherit=True), user)
        printed = output.getvalue()
    return user


def _run_in_group(rank: int, size: int, page: str, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # every worker is a machine
    os.chdir(folder)
    user = run_blocks(page)
    if page in ("local_steps.md", "how_to/two_machines.md"):
        assert user["switch"].low_rank
        assert all(map(same_everywhere, user["model"].parameters()))
    for value in user.values():
        if isinstance(value, pf.Checkpoint):
            value.close()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ELSEWHERE and blocks(page, "python", "diff")]
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if WORKERS.get(page):
        in_processes(_run_in_group, WORKERS[page], page, str(tmp_path))
        return
    for library in ("transformers", "lightning", "accelerate"):
        if any(f"import {library}" in code or f"from {library}" in code for code in blocks(page, "python")):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    user = run_blocks(page)
    if page == "how_to/save_and_load.md":
        assert Path("small/model.safetensors").is_file()
        torch.testing.assert_close(user["own"](user["x"]), user["fresh"](user["x"]))
    elif page == "how_to/resume.md":
        assert sorted(path.name for path in Path("runs/a").glob("0*")) == [
            f"00000{n}-step-{2 * n}" for n in (1, 2, 3)
        ]
    elif page == "how_to/choose_rank.md":
        assert isinstance(user["ema"].module[0], pf.layers.LowRankLinear)  # changed along


def test_all_python_code_is_found() -> None:
    assert [page for page, path in TEXTS.items() if "{code-block}" in path.read_text()] == []


def commands(page: str) -> list[list[str]]:
    """Words of every `pufferfish …` command line in the blocks without language."""
    text = "\n".join(blocks(page, "", "console")).replace("\\\n", " ").replace(" … ", " ")
    lines = [re.sub(r"^.*-m pufferfish ", "pufferfish ", line) for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pufferfish ")]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_commands_parse(page: str) -> None:
    for words in commands(page):
        command_parser(COMMANDS).parse_args(words)  # SystemExit for an unknown option or a missing argument


def documented() -> dict[str, str]:
    """Full name → page of everything that the reference documents."""
    found = {}
    for page in PAGES:
        module = ""
        for kind, name in re.findall(
            r"^\.\. (currentmodule|autofunction|autoclass|autodata):: (\S+)", TEXTS[page].read_text(), re.M
        ):
            if kind == "currentmodule":
                module = name
            else:
                found[name if name.startswith("pufferfish.") else f"{module}.{name}"] = page
    return found


def find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_reference_has_every_public_name() -> None:
    there = [id(find(name)) for name in documented() if ".integrations." not in name]
    public = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (pf, pf.compression, pf.distributed, pf.layers, pf.lowrank, pf.measure)
        for name in module.__all__
        if getattr(getattr(module, name), "__module__", "") != "pufferfish.layers.names"  # for our packages
    }
    missing = [name for name, x in public.items() if not inspect.ismodule(x) and id(x) not in there]
    assert not missing, "add them to a page in docs/reference"
    assert len(there) == len(set(there)), "a name is documented twice"


def undocumented(name: str, x: Any) -> list[str]:
    """`name`, and the public methods and properties of a class, where they have no docstring, own or inherited."""
    if not inspect.isclass(x):
        return [name] if inspect.isfunction(x) and not x.__doc__ else []
    own = x.__dict__["__doc__"] or ""
    missing = [name] if not own or own.startswith(f"{x.__name__}(") else []  # dataclasses get their signature
    members = [k for k in vars(x) if not k.startswith("_") and k not in _fields(x)]
    return missing + [f"{name}.{k}" for k in members if not inspect.getdoc(getattr(x, k))]


def _fields(x: type) -> set[str]:
    return {name for base in x.__mro__ for name in vars(base).get("__annotations__", {})}


def test_public_names_have_docstrings() -> None:
    names = [name for name in documented() if ".integrations." not in name]
    assert [missing for name in names for missing in undocumented(name, find(name))] == []


def test_every_page_is_in_the_contents() -> None:
    listed = set()
    for page, path in PAGES.items():
        for toctree in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), re.DOTALL | re.M):
            for line in toctree.splitlines():
                if line and not line.startswith(":"):
                    target = re.sub(r".*<(.*)>", r"\1", line)
                    listed.add(os.path.normpath(os.path.join(os.path.dirname(page), target)) + ".md")
    assert listed == PAGES.keys() - {"index.md"}


def anchors(path: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M), re.M
    )
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", TEXTS[page].read_text(), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = TEXTS[page].parent / file if file else TEXTS[page]
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


def messages() -> list[str]:
    """Every text in the package that may be a message, with "…" for what is filled in."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return "".join(map(text, node.values)) if isinstance(node, ast.JoinedStr) else "…"

    return [
        text(node)
        for file in (DOCS.parent / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    ]


def test_the_troubleshooting_page_quotes_real_messages() -> None:
    """Each message is one text of the package, with "…" for any part of it."""
    quoted = re.findall(r"^\| `(.*?)` \|", TEXTS["troubleshooting.md"].read_text(), re.M)
    assert len(quoted) > 50
    texts = "\n".join(messages())
    found = [re.search(".*".join(map(re.escape, re.split("\\s*…\\s*", quote))), texts) for quote in quoted]
    assert [quote for quote, match in zip(quoted, found, strict=True) if not match] == []


def _tutorial_worker(rank: int, size: int, port: int, folder: str, script: str) -> None:
    as_torchrun(rank, size, port)
    os.chdir(folder)
    sys.path.insert(0, folder)
    with open(f"output-{rank}", "w") as output, contextlib.redirect_stdout(output):
        runpy.run_path(script, run_name="__main__")


def shape(text: str) -> list[str]:
    """Lines without their numbers and spacing: those depend on the machine."""
    return [" ".join(re.sub(r"\d[\d.,]*", "0", line).split()) for line in text.strip().splitlines()]


def test_the_cnn_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the page is run, and prints what the page shows below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for code in blocks("tutorials/cnn.md", "python"):
        if name := FILE.match(code):
            Path(name[1]).write_text(code)
        else:
            exec(code, {})
    shown = blocks("tutorials/cnn.md", "text")
    for command, expected in zip(blocks("tutorials/cnn.md", "console"), shown, strict=True):
        program, *words = shlex.split(command)
        if program == "torchrun":
            workers, script = int(words[words.index("--nproc-per-node") + 1]), words[-1]
            forked(_tutorial_worker, workers, (workers, free_port(), str(tmp_path), script), name=command)
            output = Path("output-0").read_text()
            assert float(re.findall(r"accuracy ([\d.]+)", output)[0]) > 90
        elif words[0] == "advise":  # takes half a minute: its options are parsed by a test above
            continue
        else:
            captured = io.StringIO()
            with contextlib.redirect_stdout(captured):
                assert main(words) == 0
            output = captured.getvalue()
        assert shape(output) == shape(expected), output


def test_the_picture_shows_the_table() -> None:
    script = runpy.run_path(str(DOCS / "time_to_quality.py"))
    results = TEXTS["results.md"].read_text()
    picture = (DOCS / "time_to_quality.svg").read_text()
    assert picture == script["picture"](results), "run python docs/time_to_quality.py"


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path / "site")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):  # opens offline
        assert not re.findall(r'<(?:script|link|img)[^>]*"https?://[^>]*>', page.read_text()), page
    assert (tmp_path / "site" / "searchindex.js").is_file()
