"""`RunLog` and `read_run`: round trips, crashes, resumes, and errors that name file and line of damage."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

from pufferfish.measure import RunLog, read_run


def logged_steps(run_folder: Path, name: str = "loss") -> list[int]:
    return [step for _, step, _ in read_run(run_folder).metrics.get(name, [])]


@pytest.mark.filterwarnings("error")
def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    settings = {"lr": 0.1, "method": {"name": "topk", "k": [1, 2]}}
    with RunLog(folder, settings=settings, seed=3, workers=4, hosts=2, link={"asked": "1gbit"}) as log:
        loss = torch.tensor([1.5], requires_grad=True).square().mean()
        log.log(step=1, epoch=0.5, loss=loss, **{"valid/accuracy, top 1": 0.1 + 0.2})
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
    assert first == 2.25
    assert run.metrics["valid/accuracy, top 1"][0][2] == 0.1 + 0.2
    assert math.isnan(second)
    assert (folder / "metrics.csv").read_text().splitlines()[0] == "seconds,step,epoch,name,value"


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


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with RunLog(tmp_path / "run") as log:
        log.log(step=1, loss=1.0)
        log.result(accuracy=1)
        log.describe(layers=[])
    assert not (tmp_path / "run").exists()


def test_the_commit_and_whether_files_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()

    def logged(folder: Path) -> str | None:
        with RunLog(folder):
            return read_run(folder).versions["commit"]

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    git("init", "-q", ".")
    git("add", "a.txt")
    git("-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    git("config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    assert logged(tmp_path / "one") == head
    Path("a.txt").write_text("b\n")
    assert logged(tmp_path / "two") == f"{head}+"
    assert not (tmp_path / "ran").exists()  # a program of the repository


def test_damage_and_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"run\.json: settings"):
        RunLog(tmp_path / "run", settings={"model": torch.nn.Linear(1, 1)})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"has no run\.json"):
        read_run(tmp_path)
    with RunLog(tmp_path) as log:
        log.log(step=1, loss=1.0, lr=1.0)
    good = {name: (tmp_path / name).read_text() for name in ("metrics.csv", "run.json")}
    for name, text, words in (
        ("metrics.csv", "seconds,step\n", r"metrics\.csv:1: the columns must be"),
        (
            "metrics.csv",
            good["metrics.csv"] + "1.0,two,,loss,3\n",
            r"metrics\.csv:4: '1\.0,two,,loss,3' is not",
        ),
        ("run.json", good["run.json"].replace('"seed"', "oops"), r"run\.json: not valid JSON"),
        ("run.json", json.dumps({"pufferfish_run": 99}), "not a run of format version 1"),
        ("run.json", json.dumps({"pufferfish_run": 1, "name": "x"}), "missing fields: settings, versions"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            read_run(tmp_path)
        (tmp_path / name).write_text(good[name])
