"""A user's file with `build()` and `data()`: training on workers with a kill and a resume, its figures, its identity, its errors."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_train import values, weights
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

import pufferfish as pf
from processes import as_torchrun, forked, free_port
from pufferfish.checkpoint.folder import list_checkpoints
from pufferfish.cli import main
from pufferfish.lab.tasks import Task, find_task
from pufferfish.lab.tasks.find_task import FileTask
from pufferfish.measure import read_run

PAGE = Path(__file__).parents[2] / "docs" / "quick_start.md"
IMPORTS = "import torch\nfrom torch import nn\nfrom torch.utils.data import Dataset\n"
BUILD = "def build():\n    return nn.Linear(4, 3)\n"
DATA = "def data():\n    return (torch.randn(20, 4), torch.arange(20) % 3), (torch.randn(5, 4), torch.arange(5) % 3)\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*functions: str) -> str:
    Path("mine.py").write_text("\n\n".join([IMPORTS, *functions]))
    return "mine.py"


def task(*functions: str) -> FileTask:
    """A new file for each call, since a file is imported once."""
    path = Path(f"mine{len(list(Path().glob('mine*.py')))}.py")
    path.write_text("\n\n".join([IMPORTS, *functions]))
    found = find_task(str(path))
    assert isinstance(found, FileTask)
    return found


def killed(rank: int, port: int, folder: str, words: list[str], at: int | None) -> None:
    """`pufferfish train` as a worker of torchrun; it dies in forward pass number `at`."""
    as_torchrun(rank, 2, port)
    os.chdir(folder)
    loss, calls = FileTask.loss, iter(range(10**6))

    def dies(*args: Any) -> Tensor:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*args)

    FileTask.loss = dies  # type: ignore[method-assign]
    assert main(words) == 0


def test_the_file_of_the_page_is_trained_killed_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers, a switch and compression; the resumed run is bit-identical to an uninterrupted one."""
    code = re.findall(r"```python\n(# my_model\.py\n.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 15
    Path("my_model.py").write_text(code)
    words = ["train", "my_model.py", "--method", "pufferfish+powersgd(4)", "--epochs", "3",
             "--device", "cpu", "--save-every", "7"]  # fmt: skip
    with pytest.raises(ProcessException):
        forked(killed, 2, (free_port(), str(tmp_path), [*words, "--out", "run"], 30), name="killed")
    assert read_run("run").finished is None
    assert [path.name for path in list_checkpoints(Path("run/checkpoints"))][-1:] == ["000005-step-28"]
    shutil.copytree("run", "alone")
    assert main([*words, "--out", "alone"]) == 0  # on one worker
    said = capsys.readouterr().err
    assert "resumed after update 28 of " in said
    assert (
        "; not restored: compressor (not passed); data (saved by 2 workers, now 1); random numbers (" in said
    )
    assert "Warning" not in said
    forked(killed, 2, (free_port(), str(tmp_path), [*words, "--out", "run"], None), name="resumed")
    assert main([*words, "--per-node", "2", "--simulate", "--out", "straight"]) == 0
    said = capsys.readouterr().err  # with the same numbers of epochs, from 1
    assert (
        said.index("epoch 1/3") < said.index("Switched to low rank after epoch 1: ") < said.index("epoch 2/3")
    )
    again, straight = read_run("run"), read_run("straight")
    for name in ("loss", "valid/accuracy", "bytes"):
        assert values(again, name) == values(straight, name)
    assert again.results["accuracy"] == straight.results["accuracy"]
    theirs = weights(Path("straight"))
    assert all(torch.equal(x, theirs[name]) for name, x in weights(Path("run")).items())
    model = find_task("my_model.py").build()
    assert pf.load(model, "run/model").ranks
    assert all(torch.equal(x, theirs[name]) for name, x in model.state_dict().items())


def test_a_pattern_that_matches_nothing_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        write(BUILD, DATA),
        "--batch",
        "10",
        "--method",
        "pufferfish(keep=stem)",
        "--device",
        "cpu",
    ]
    assert main(words) == 2
    assert "keep: the pattern 'stem' matches no layer" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_loss_that_is_not_finite_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    loss = "def loss(output, target):\n    return output.mean() * float('nan')\n"
    words = ["train", write(BUILD, DATA, loss), "--batch", "10", "--epochs", "2", "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert said.count("training loss nan at update 2: check the data, or lower --lr") == 1
    assert "validation loss nan" in said
    assert said.endswith("inf or NaN in the weights after 2 updates; training ends here\n")


def test_a_run_belongs_to_the_text_of_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", write(BUILD, DATA), "--batch", "10", "--epochs", "1", "--device", "cpu", "--out"]
    assert main([*words, "run"]) == 0
    assert "validation accuracy" in capsys.readouterr().out  # there is no test data
    assert read_run("run").settings["task"] == repr(find_task("mine.py"))
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")  # the folder of the file does not matter
    assert main([words[0], "../mine.py", *words[2:], "../run"]) == 0
    assert "all updates are done: 2 of 2" in capsys.readouterr().err
    Path("mine.py").write_text(
        Path("../mine.py").read_text().replace("nn.Linear(4, 3)", "nn.Linear(4, 3, bias=False)")
    )
    assert main([*words, "../run"]) == 2
    assert capsys.readouterr().err == (
        "pufferfish train: ../run: mine.py has changed since this run started, and ../run/mine.py is its text of then; "
        "undo the change, or choose another --out for a new run\n"
    )


def test_a_bench_belongs_to_the_text_of_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    def words(file: str) -> list[str]:
        return [
            "bench",
            file,
            "--methods",
            "narrow(0.5)",
            "--batch",
            "10",
            "--epochs",
            "1",
            "--rounds",
            "1",
            "--out",
            "out",
        ]

    build = "def build(width=1.0):\n    n = int(32 * width)\n    return nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, n), nn.Linear(n, 3))\n"
    assert main(words(write(build, DATA))) == 0
    assert "narrow(0.5)" in capsys.readouterr().out
    os.mkdir("new")
    Path("new/mine.py").write_text(Path("mine.py").read_text().replace("32", "48"))
    bench = Path("out/bench.json")
    bench.write_text(bench.read_text().replace('"mine.py"', '"new/mine.py"'))
    assert main(words("new/mine.py")) == 2
    assert "mine.py has changed since this run started" in capsys.readouterr().err


def test_other_tasks_have_no_address_in_their_identity() -> None:
    class Plain(Task):
        recipes = build = load = steps = epoch = loss = evaluate = None  # type: ignore[assignment]

    assert repr(Plain()) == "Plain()"


DATASET = """
class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def data():
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    valid = torch.randn(5, 4), torch.arange(5) % 3
    return {}, {}
"""


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_tensors_and_datasets_give_the_same_batches(split: str) -> None:
    arrays = "(x.numpy(), y.numpy())", "tuple(z.numpy() for z in valid)"
    wrapped = "torch.utils.data.TensorDataset(x, y)", "torch.utils.data.TensorDataset(*valid)"
    tasks = [
        task(BUILD, DATASET.format(*pair))
        for pair in (("(x, y)", "valid"), ("Pairs(x, y)", "Pairs(*valid)"), wrapped, arrays)
    ]
    for worker in range(2 if split == "train" else 1):
        order = {"worker": worker, "world_size": 2, "start": 1} if split == "train" else {}
        epochs = [
            [*x.batches(x.load(None), split, 4, generator=torch.Generator().manual_seed(3), **order)]
            for x in tasks
        ]
        assert len(epochs[0]) == (4 if split == "train" else 2)
        for others in epochs[1:]:
            for one, other in zip(epochs[0], others, strict=True):
                assert all(map(torch.equal, one, other))


def test_figures_are_means_over_all_rows() -> None:
    found = task(BUILD, DATA)
    model, data = found.build(), found.load(None)
    ((inputs, targets),) = found.batches(data, "valid", 100)
    with torch.no_grad():
        logits = model(inputs)
    expected = {"loss": float(F.cross_entropy(logits, targets)),
                "accuracy": 100 * sum(int(row.argmax()) == int(y) for row, y in zip(logits, targets, strict=True)) / 5}  # fmt: skip
    model.train()
    assert found.evaluate(model, data, "valid", batch=2) == pytest.approx(expected, rel=1e-6)
    assert model.training
    assert (found.metric, found.higher_is_better) == ("accuracy", True)


def test_own_loss_score_and_several_inputs() -> None:
    build = "class Sum(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 1)\n\n    def forward(self, a, b):\n        return self.fc(a + b)\n\n\nbuild = Sum\n"
    data = "def data():\n    a, b = torch.randn(2, 6, 4)\n    return [(a, b, a[:, :1])] * 2\n"
    loss = "def loss(output, target):\n    return (output - target).square().mean()\n"
    score = "def score(output, target):\n    return -(output - target).abs().mean()\n"
    plain, scored = task(build, data, loss), task(build, data, loss, score)
    assert (plain.metric, plain.higher_is_better) == ("loss", False)
    assert (scored.metric, scored.higher_is_better) == ("score", True)
    model, rows = scored.build(), scored.load(None)
    scored.check(model, rows, "cpu")
    ((a, b, target),) = scored.batches(rows, "valid", 6)
    with torch.no_grad():
        error = model(a, b) - target
    expected = {"loss": float(error.square().mean()), "score": -float(error.abs().mean())}
    assert scored.evaluate(model, rows, "valid", batch=4) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(
        scored.loss(model, (a, b, target), scored.recipe("short")), error.square().mean()
    )


def test_random_data_is_the_same_everywhere() -> None:
    found = [task(BUILD, DATA) for _ in range(2)]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (x.load(None)["train"].batch(torch.arange(20)) for x in found)
    assert all(map(torch.equal, first, second))
    assert torch.equal(before, torch.random.get_rng_state())


X, Y = "torch.randn(20, 4)", "torch.arange(20) % 3"


def data_of(train: str, valid: str = f"({X}, {Y})") -> str:
    return f"def data():\n    return {train}, {valid}\n"


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([DATA], "mine.py has no function 'build'; add `def build(): return model`"),
        ([BUILD], "mine.py has no function 'data'; add `def data(): return (inputs, targets), (inputs, targets)`"),
        ([BUILD, "def data():\n    return 1 / 0\n"], "mine.py, line 11: data() raised ZeroDivisionError"),
        ([BUILD, "def data():\n    return 3\n"], "data() returned int; return train, valid"),
        ([BUILD, data_of("3")], "data(), train: it is of type int, neither a tuple of tensors nor a Dataset; return tensors"),
        ([BUILD, data_of(f"({X}, torch.arange(9))")], "data(), train: its tensors have 20 and 9 rows; return tensors"),
        ([BUILD, data_of(f"({X}, {Y})", "(torch.randn(0, 4), torch.arange(0))")], "data(), valid: there are no rows"),
        ([BUILD, data_of(f"[({X}[i],) for i in range(20)]")], "rows of data() have no target; return tensors"),
        ([BUILD, data_of("[{'x': i} for i in range(20)]")], "its rows are of type dict, not tuples; return tensors"),
        ([BUILD, data_of("(torch.randn(9, 4), torch.arange(9))")], "mine.py: data() has 9 training rows, fewer than a batch of 10; return more rows, or lower --batch"),
        ([BUILD, data_of(f"(torch.randn(20, 5), {Y})")], "mine.py: the model on inputs of shape (2, 5) raised RuntimeError: mat1"),
        ([BUILD, data_of(f"({X}, torch.randn(20, 1))")], "the default loss, cross-entropy, needs classes; add `def loss(output, target)"),
        ([BUILD, data_of(f"({X}, torch.ones(20, 2).long())")], "mine.py: loss(output, target) on (2, 3) and (2, 2) raised RuntimeError"),
        ([BUILD, data_of(f"({X}, torch.ones(20, 2).long())")], "the default is cross-entropy of (rows, classes) and (rows); add `def loss("),
        ([BUILD, DATA, "def score(output, target):\n    return output\n"], "mine.py: score(output, target) on (2, 3) and (2,) raised"),
        (["def build():\n    return 3\n", DATA], "mine.py: build() must return a model, got int"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_what_to_add(
    functions: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", write(*functions), "--batch", "10", "--epochs", "1", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "."], "--data .: mine.py reads its own data, in data(); remove --data"),
        (["--method", "narrow"], "the model of mine.py takes no width; add the argument `width=1.0` to the function"),
        (["--per-node", "3"], "a batch of 10 cannot be split equally over 3 workers; change --batch"),
        (["--batch", "40", "--per-node", "2"], "data() has 20 training rows, fewer than a batch of 40"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", write(BUILD, DATA), "--epochs", "1", "--device", "cpu", "--batch", "10", *options]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_plan_uses_the_data() -> None:
    found = task(
        "def build():\n    return nn.Linear(64, 64)\n",
        "def data():\n    return [(torch.randn(80, 64), torch.arange(80))] * 2\n",
    )
    batch = found.file.example()
    assert batch is not None
    assert [len(x) for x in batch] == [64, 64]
    assert main(["plan", str(found.file.path)]) == 0
    assert isinstance(found.build(), nn.Linear)
