"""Workers of a bench on hosts of this machine: started, listened to, and started again without a cell that failed."""

from __future__ import annotations

import json
import shutil
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..network import Hosts, emulate, why_not
from ..report.numbers import seconds
from ..train.launch_workers import GRACE, sigterm_too
from ..train.screen import Screen
from .bench_settings import Asked

#: Of the workers' words, when they fail and do not say where.
_LAST = 15


def run_on_hosts(asked: Asked, root: Path, given: dict[str, Any], screen: Screen) -> list[str]:
    """Do all that is left, as `Work` with these settings does; names of the cells that failed."""
    network, reason = asked.network, why_not() if asked.network else None
    if reason:
        screen.say(
            f"network {network}: {reason}. The plain loopback takes its place; steps on {network} are predicted"
        )
        given, network = given | {"elsewhere": network}, None
    heard = Heard(screen)
    with sigterm_too(), emulate(network, asked.hosts) as hosts:
        if asked.hosts > 1:
            link = hosts.measure()
            screen.say(f"link: {link}")
            given = given | {"link": asdict(link)}
        while not _launched(hosts, asked, root, given | {"skip": heard.failed}, heard):
            screen.say("the others go on")
    return heard.failed


def _launched(hosts: Hosts, asked: Asked, root: Path, given: dict[str, Any], heard: Heard) -> bool:
    """Whether the workers came to their end; False when a cell failed and others are left."""
    before = len(heard.failed)
    heard.screen.progress(f"starting {asked.workers} workers …")
    words = ["-m", "pufferfish.lab.bench.worker", str(root), "--given", json.dumps(given)]
    code = hosts.launch(words, per_host=asked.per_host, write=heard, grace=GRACE)
    if code and len(heard.failed) == before:
        raise OSError("the workers failed with exit code {}:\n{}".format(code, "\n".join(heard.last)))
    return not code or "timing" in heard.failed


class Heard:
    """Turns the workers' lines into a screen's.

    >>> heard = Heard(Screen(silent=True))
    >>> heard('host0 | @{"failed": "runs/x/seed-0", "error": "ValueError: no"}')
    >>> heard.failed
    ['runs/x/seed-0']
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.failed: list[str] = []
        self.last: deque[str] = deque(maxlen=_LAST)
        self._at = ""

    def __call__(self, line: str) -> None:
        text = line.partition(" | ")[2]
        if not text:
            return
        if not text.startswith("@{"):
            self.last.append(line)
            if text.startswith("epoch"):
                self.screen.progress(f"{self._at} {text}"[: shutil.get_terminal_size().columns - 1])
            return
        self.tell(json.loads(text[1:]))

    def tell(self, told: dict[str, Any]) -> None:
        """What `Work` says."""
        say, progress = self.screen.say, self.screen.progress
        if "begin" in told:
            self._at = f"[{told['number']}/{told['of']}] {told['begin']}"
            progress(f"{self._at} …")
        elif "done" in told:
            say(f"{self._at}: {told['measure']} {told['score']:.2f}, {seconds(told['seconds'])}")
        elif "timing" in told:
            self._at = f"timing the steps of {', '.join(told['timing'])}"
            say(f"{self._at} …")
        elif "round" in told:
            progress(f"round {told['round']} of {told['of']}")
        elif "failed" in told and told["failed"] not in self.failed:
            self.failed.append(told["failed"])
            say(f"{told['failed']} failed: {told['error']}")
