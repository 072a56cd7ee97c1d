"""Limits for the number of files that a reader has to open to follow a typical call."""

from __future__ import annotations

import multiprocessing

import pytest

from data_ways import Opened, factorize, files, functions, worker
from processes import in_processes


@pytest.fixture(scope="module")
def opened() -> Opened:
    result: Opened = {}
    factorize(result)
    receiver, sender = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    in_processes(worker, 2, sender)
    return result | receiver.recv()


@pytest.mark.parametrize(
    ("name", "limit"), [("plan, factorize_, merge_", 14), ("switch", 16), ("backward", 6)]
)
def test_few_files_are_opened(name: str, limit: int, opened: Opened) -> None:
    assert len(files(opened[name])) <= limit, files(opened[name])


def test_few_functions_run_in_a_backward_pass(opened: Opened) -> None:
    assert len(functions(opened["backward"])) <= 40, functions(opened["backward"])
