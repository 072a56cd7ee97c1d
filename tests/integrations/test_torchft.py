"""torchft: replicas that are killed, hang, join and come back; each in a real process."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torchft")

from integrations.elastic import Accident, Job, all_do, close_to, cluster, reference


def test_replicas_train_as_the_reference_does() -> None:
    with cluster(job := Job(momentum=0.9)) as c:
        three = [c.add(name) for name in "abc"]
        all_do(three, "start")
        found = all_do(three, "until", 8)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2)] * 2))


@pytest.mark.parametrize("collective", [0, 1, 2])
def test_a_replica_is_killed_in_an_exchange_and_joins_again(collective: int) -> None:
    """The survivors keep the updates of this round and average without it; a new process gets everything from them."""
    with cluster(job := Job(momentum=0.9)) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=2, collective=collective))
        all_do([a, b, lost], "start")
        all_do([a, b, lost], "until", 4)
        for one in (a, b, lost):
            one.tell("until", 8)
        lost.dies()
        found = [one.answer() for one in (a, b)]
        assert found[0]["anchor"] == found[1]["anchor"]
        close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1)]))
        back = c.add("c")
        back.tell("start")
        c.wait_for_joiner()  # in the round that the others complete at 12
        all_do([a, b], "until", 12)
        assert back.answer()["position"] == 12
        found = all_do([a, b, back], "until", 16)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)]))


def test_a_replica_hangs_and_comes_back() -> None:
    with cluster(job := Job(timeout=2.0)) as c:
        a, b = c.add("a"), c.add("b")
        stopped = c.add("c", Accident(round=2, collective=1, signal=signal.SIGSTOP))
        all_do([a, b, stopped], "start")
        for one in (a, b, stopped):
            one.tell("until", 12)
        stopped.hangs()
        found = [one.answer() for one in (a, b)]
        close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1)]))
        stopped.wake()
        c.wait_for_joiner()
        all_do([a, b], "until", 16)
        assert stopped.answer()["position"] == 16
        found = all_do([a, b, stopped], "until", 20)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1), (0, 1), (0, 1, 2)]))
