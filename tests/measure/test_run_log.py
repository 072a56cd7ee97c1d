"""`RunLog` and `read_run`: round trips, crashes, resumes, and errors that name file and line of damage."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pufferfish.measure import RunLog, read_run


def logged_steps(run_folder: Path, name: str = "loss") -> list[int]:
    return [step for _, step, _ in read_run(run_folder).metrics.get(name, [])]


def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    settings = {"lr": 0.1, "method": {"name": "topk", "k": [1, 2]}}
    with RunLog(folder, settings=settings, seed=3, workers=4, hosts=2, link={"asked": "1gbit"}) as log:
        log.log(step=1, epoch=0.5, loss=torch.tensor(1.5), **{"valid/accuracy, top 1": 0.25})
        log.log(step=2, loss=math.nan, lr=0.1)
        log.predict(seconds_a_step=0.5)
        log.result(accuracy=torch.tensor(0.5), loss=math.inf, seconds_a_step=0.4)
        log.describe(layers=[{"name": "fc", "shape": [4, 4], "rank": 2, "full_rank": 4}])
        open_ = read_run(folder)
    run = read_run(folder)
    assert open_.finished is None
    assert run.finished is not None
    assert (run.name, run.seed, run.workers, run.hosts) == ("b", 3, 4, 2)
    assert (run.settings, run.link) == (settings, {"asked": "1gbit"})
    assert run.results == {"accuracy": 0.5, "loss": None, "seconds_a_step": 0.4}
    assert run.predicted == {"seconds_a_step": 0.5}
    assert run.layers[0]["rank"] == 2
    assert run.versions["torch"] == torch.__version__
    assert list(run.metrics) == ["loss", "valid/accuracy, top 1", "lr"]
    (t1, _, first), (t2, _, second) = run.metrics["loss"]
    assert 0 <= t1 <= t2
    assert first == 1.5
    assert math.isnan(second)
    assert (folder / "metrics.csv").read_text().splitlines()[0] == "seconds,step,epoch,name,value"


def test_numbers_keep_all_digits(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(step=1, loss=0.1 + 0.2)
    assert read_run(tmp_path).metrics["loss"][0][2] == 0.1 + 0.2


@pytest.mark.filterwarnings("error")
def test_loss_that_requires_grad(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(step=1, loss=torch.tensor([2.0], requires_grad=True).square().mean())
    assert read_run(tmp_path).metrics["loss"][0][2] == 4.0


def test_resume_drops_later_rows_and_continues_the_clock(tmp_path: Path) -> None:
    log = RunLog(tmp_path, name="first")
    for step in range(1, 6):
        log.log(step=step, loss=1.0)
    log.result(switched=3)
    log.close(finished=False)
    before = read_run(tmp_path)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("7.5,6,,lo")  # cut off by a crash
    assert logged_steps(tmp_path) == [1, 2, 3, 4, 5]
    with RunLog(tmp_path, name="first", resume=3) as log:
        log.log(step=4, loss=2.0)
    after = read_run(tmp_path)
    assert logged_steps(tmp_path) == [1, 2, 3, 4]
    assert after.metrics["loss"][:3] == before.metrics["loss"][:3]
    assert after.metrics["loss"][3][0] >= before.metrics["loss"][2][0]
    assert after.started == before.started
    assert after.results == {"switched": 3}


def test_unfinished_run_restarts_and_finished_run_is_kept(tmp_path: Path) -> None:
    def crashes() -> None:
        with RunLog(tmp_path) as log:
            log.log(step=1, loss=1.0)
            raise KeyError

    with pytest.raises(KeyError):
        crashes()
    assert read_run(tmp_path).finished is None
    with pytest.warns(UserWarning, match=r"metrics\.csv: discarding 1 rows of an unfinished run; .*resume="):
        log = RunLog(tmp_path, name="again")
    with log:
        log.log(step=9, loss=1.0)
    assert logged_steps(tmp_path) == [9]
    with pytest.raises(ValueError, match=r"finished run 'again'; choose another folder.*resume="):
        RunLog(tmp_path)
    assert logged_steps(tmp_path) == [9]
    with RunLog(tmp_path, resume=9) as log:  # a longer run
        log.log(step=10, loss=1.0)
    assert logged_steps(tmp_path) == [9, 10]


@pytest.mark.filterwarnings("error")
def test_no_warning_if_no_row_is_lost(tmp_path: Path) -> None:
    RunLog(tmp_path).close(finished=False)
    log = RunLog(tmp_path)
    log.log(step=1, loss=1.0)
    log.close(finished=False)
    with RunLog(tmp_path, resume=1) as log:
        log.log(step=2, loss=1.0)
    assert logged_steps(tmp_path) == [1, 2]


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with RunLog(tmp_path / "run") as log:
        log.log(step=1, loss=1.0)
        log.result(accuracy=1)
        log.describe(link={})
    assert not (tmp_path / "run").exists()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is a repository of one committed file, `a.txt`; `ran` says that one of its programs ran."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "a.txt").write_text("a\n")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.com")
    git("init", "-q", ".")
    git("add", "a.txt")
    git("commit", "-q", "-m", "first")
    (folder / "program").write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    (folder / "program").chmod(0o700)
    return folder


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def logged_commit(folder: Path) -> str | None:
    with RunLog(folder):
        return read_run(folder).versions["commit"]


def test_the_commit_and_whether_files_have_changed(repository: Path, tmp_path: Path) -> None:
    head = git("rev-parse", "HEAD")
    os.utime("a.txt", (1, 1))  # a new time alone is no change
    assert logged_commit(tmp_path / "one") == head
    Path("a.txt").write_text("b\n")
    assert logged_commit(tmp_path / "two") == f"{head}+"


def use_fsmonitor(repository: Path) -> None:
    git("config", "core.fsmonitor", str(repository / "program"))


def use_filter(repository: Path) -> None:
    git("config", "filter.foreign.clean", str(repository / "program"))
    (repository / ".git" / "info" / "attributes").write_text("a.txt filter=foreign\n")
    os.utime("a.txt", (1, 1))  # git compares the contents


def use_filter_of_another_repository_inside(repository: Path) -> None:
    git("clone", "-q", ".", "inside")
    git("add", "inside")
    git("commit", "-q", "-m", "second")
    git("-C", "inside", "config", "filter.foreign.clean", str(repository / "program"))
    (repository / "inside" / ".git" / "info" / "attributes").write_text("a.txt filter=foreign\n")
    os.utime("inside/a.txt", (1, 1))


def use_remote_of_missing_objects(repository: Path) -> None:
    """As in a partial clone, from which git fetches what it needs."""
    tree = git("rev-parse", "HEAD^{tree}")
    for key, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", f"ext::{repository}/program"),
        ("protocol.ext.allow", "always"),
    ):
        git("config", key, value)
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


@pytest.mark.parametrize(
    "use",
    [use_fsmonitor, use_filter, use_filter_of_another_repository_inside, use_remote_of_missing_objects],
)
def test_no_program_of_the_repository_runs(
    use: Callable[[Path], None], repository: Path, tmp_path: Path
) -> None:
    use(repository)
    commit = logged_commit(tmp_path / "run")
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "status"], capture_output=True, timeout=60)  # it is one that git would run
    assert (tmp_path / "ran").exists()
    if use is use_filter:
        assert commit == git("rev-parse", "HEAD") + "?"  # unknown without the filter


def test_settings_that_are_not_json_create_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"run\.json: settings"):
        RunLog(tmp_path / "run", settings={"model": torch.nn.Linear(1, 1)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        ("metrics.csv", 1, "seconds,step\n", r"metrics\.csv:1: the columns must be"),
        ("metrics.csv", 3, "1.0,two,,loss,3\n", r"metrics\.csv:3: '1\.0,two,,loss,3' is not a valid row"),
        ("metrics.csv", 2, "1.0,2,,loss\n", r"metrics\.csv:2: .* is not a valid row"),
        ("run.json", 2, "oops\n", r"run\.json:2: not valid JSON"),
    ],
)
def test_error_names_the_damaged_line(tmp_path: Path, file: str, line: int, text: str, message: str) -> None:
    with RunLog(tmp_path) as log:
        log.log(step=1, loss=1.0, lr=1.0)
    lines = (tmp_path / file).read_text().splitlines(keepends=True)
    lines[line - 1] = text
    (tmp_path / file).write_text("".join(lines))
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_folders_that_are_not_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"pufferfish_run": 99}))
    with pytest.raises(ValueError, match="not a run of format version 1"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"pufferfish_run": 1, "name": "x"}))
    with pytest.raises(ValueError, match="missing fields: settings, versions"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_run(tmp_path)


def test_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OSError, match="run"):
        RunLog(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    assert log._file is not None
    log._file.close()
    log._file = Path("/dev/full").open("w")  # noqa: SIM115 (closed by the log)
    for write in (lambda: log.log(step=1, loss=1.0), log.close):
        with pytest.raises(OSError, match=r"No space left on device.*metrics\.csv'"):
            write()
