"""`run_on_hosts`: starts the workers of a bench on hosts of this machine; after a failed run, again without it."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..network import Hosts, Network, unavailable_reason
from ..report.formatting import format_score, format_seconds
from ..train.console import Console
from ..train.workers import GRACE_SECONDS, sigterm_as_sigint
from .bench_settings import BenchSettings

#: Lines of output shown when workers fail without an event.
_LAST_LINES = 15


def run_on_hosts(settings: BenchSettings, root: Path, options: dict[str, Any], display: EventDisplay) -> None:
    """Start workers until all runs are finished or failed.

    Args:
        options: arguments of `BenchWorker`, for JSON.
        display: shows the events of the workers and keeps the names of the failed runs.
    """
    network, reason = settings.network, unavailable_reason() if settings.network else None
    if reason:
        display.console.info(
            f"network {network}: {reason}. Using the unshaped loopback; steps on {network} are predicted"
        )
        options, network = options | {"target_link": network}, None
    emulated = Hosts(settings.nodes) if network is None else Network(settings.nodes, network)
    with sigterm_as_sigint(), emulated as hosts:
        if settings.nodes > 1:
            link = hosts.measure()
            display.console.info(f"link: {link}")
            options = options | {"link": asdict(link)}
        while not _launch(hosts, settings, root, options | {"skip": display.failed}, display):
            display.console.info("continuing with the other runs")


def _launch(
    hosts: Hosts, settings: BenchSettings, root: Path, options: dict[str, Any], display: EventDisplay
) -> bool:
    """Run the workers; False if a run failed and others are left."""
    failed_before = len(display.failed)
    display.console.progress(f"starting {settings.workers} workers …")
    command = ["-m", "pufferfish.lab.bench.bench_worker", str(root), "--options", json.dumps(options)]
    code = hosts.launch(command, per_host=settings.per_node, write=display, grace=GRACE_SECONDS)
    if code and len(display.failed) == failed_before:
        raise OSError("\n".join([f"the workers failed with exit code {code}:", *display.last_lines]))
    return not code or "timing" in display.failed


class EventDisplay:
    """Shows the events of a `BenchWorker` on a console. Called with the output of workers, line by line.

    >>> display = EventDisplay(Console(silent=True))
    >>> display('host0 | @{"failed": "runs/x/seed-0", "error": "ValueError: no"}')
    >>> display.failed
    ['runs/x/seed-0']
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.failed: list[str] = []
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._position = ""
        self._time_left = ""
        self._run_seconds: list[float] = []

    def __call__(self, line: str) -> None:
        """Handle a line of a host's output: an event, the progress of an epoch, or other output."""
        text = line.partition(" | ")[2]
        if text.startswith("@{"):
            self.show(json.loads(text[1:]))
        elif text:
            self.last_lines.append(line)
            if text.startswith("epoch"):
                self.console.progress(
                    f"{self._position}{self._time_left}: {text}"[: shutil.get_terminal_size().columns - 1]
                )

    def _estimate_time_left(self, event: dict[str, Any]) -> str:
        """How long the runs from this one on take, if they take as long as those before."""
        if not self._run_seconds:
            return ""
        seconds = statistics.mean(self._run_seconds) * (event["of"] - event["number"] + 1)
        return f", about {format_seconds(seconds)} left for the runs"

    def show(self, event: dict[str, Any]) -> None:
        """Show an event."""
        info, progress = self.console.info, self.console.progress
        if "begin" in event:
            self._position = f"[{event['number']}/{event['of']}] {event['begin']}"
            self._time_left = self._estimate_time_left(event)
            progress(f"{self._position}{self._time_left} …")
        elif "done" in event:
            score = format_score(event["measure"], event["score"])
            info(f"{self._position}: {score}, {format_seconds(event['seconds'])}")
            self._run_seconds.append(event["seconds"])
        elif "timing" in event:
            self._position = f"timing the steps of {', '.join(event['timing'])}"
            info(f"{self._position} …")
        elif "predicting" in event:
            progress("measuring computation and compression, to predict these steps …")
        elif "round" in event:
            progress(f"round {event['round']} of {event['of']} …")
        elif "failed" in event and event["failed"] not in self.failed:
            self.failed.append(event["failed"])
            info(f"{event['failed']} failed: {event['error']}")
