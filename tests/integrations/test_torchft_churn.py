"""torchft: a job whose replicas are killed all the time, at random instants."""

from __future__ import annotations

import random
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from integrations.elastic import LIMIT, Accident, Job, Remote, cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [Job(switch_at=400), Job(fragments=2, delay=1, switch_at=201)], ids=["plain", "streaming"]
)
def test_thirty_kills(job: Job, tmp_path: Path) -> None:
    """After each round all replicas have the same anchor, and the job reaches its end."""
    draw, kills = random.Random(0), 30
    end, anchors, ended, position = tmp_path / "end", dict[int, str](), 0, 0
    with cluster(job) as c:
        running: list[Remote] = []

        def start(name: str, after: int | None) -> None:
            running.append(c.add(name, None if after is None else Accident(None, after)))

        for name in "abc":
            start(name, draw.randrange(20, 400))
        start("d", None)  # somebody must be left
        for remote in running:
            remote.ready()
        for remote in running:
            remote.tell("free", end)
        while running:
            ready = wait([remote.conn for remote in running], LIMIT)
            assert ready, "the job has stopped"
            for remote in [remote for remote in running if remote.conn in ready]:
                try:
                    message = remote.conn.recv()
                except (EOFError, ConnectionResetError):
                    remote.dies()
                    running.remove(remote)
                    kills -= 1
                    # While it joins, in its first exchange, or later.
                    start(
                        remote.name, draw.choice([0, 0, 1, 3, draw.randrange(4, 400)]) if kills > 2 else None
                    )
                    running[-1].tell("free", end)
                    if kills == 0:
                        end.write_text(str(position + 100))
                    continue
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, dict):
                    assert message["ranks"] == {"2": 12}, "the switch was meanwhile"
                    ended += 1
                    running.remove(remote)
                    continue
                number, anchor, position = message
                assert anchors.setdefault(number, anchor) == anchor, f"round {number}: different anchors"
    assert (ended, kills) == (4, 0)
