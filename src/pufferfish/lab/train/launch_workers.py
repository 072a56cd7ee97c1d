"""`start`: the same command on workers of this machine, on its loopback or on an emulated network."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..network import Hosts, emulate
from .screen import RELAYED, Relay, Screen

#: Seconds that workers have to save when they are asked to stop.
GRACE = 60.0


def start(command: Sequence[str], *, network: str | None, hosts: int, per_host: int) -> int:
    """Run `command` (a script or "-m", a module, and arguments) on all workers, and show what they say.

    Ctrl-C and SIGTERM ask the workers to stop; a second time ends them at once. In any case nothing is left.

    Args:
        network: the links between hosts; None: the loopback.

    Returns:
        The exit code: 0, 2 for what they refuse, 130 when they were asked to stop, else 1.
    """
    screen = Screen()
    relay = Relay(screen)
    try:
        with sigterm_too(), _emulated(network, hosts, screen) as machines:
            link = None
            if hosts > 1 and network is None:
                screen.say(
                    "the hosts are joined by the plain loopback, not shaped; say --network, such as 100mbit"
                )
            if hosts > 1:
                link = asdict(machines.measure())
                screen.say(
                    f"link: asked {link['asked']}, got {link['got_mbit']:.1f} Mbit/s, {link['latency_ms']:.2f} ms"
                )
            env = {RELAYED: json.dumps({"link": link, "hosts": hosts})}
            code = machines.launch(command, per_host=per_host, env=env, write=relay, grace=GRACE)
    except KeyboardInterrupt:
        return 130
    if not code or relay.refused:
        return 2 if relay.refused else 0
    why = relay.why
    if relay.trouble:
        print(relay.trouble, file=sys.stderr)
        why = "a worker has failed, see above"
    screen.say(f"{why}; the same command goes on from the last checkpoint")
    return 1


def told() -> dict[str, Any]:
    """What `start` has told this worker: {"link", "hosts"}; empty where it was not started so.

    >>> told()
    {}
    """
    return dict(json.loads(os.environ.get(RELAYED, "{}")))


@contextlib.contextmanager
def _emulated(network: str | None, hosts: int, screen: Screen) -> Iterator[Hosts]:
    """In words to the user where no network can be emulated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = emulate(network, hosts)
    for warning in caught:
        screen.say(str(warning.message))
    with made:
        yield made


@contextlib.contextmanager
def sigterm_too() -> Iterator[None]:
    """SIGTERM as ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
