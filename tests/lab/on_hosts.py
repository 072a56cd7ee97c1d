"""`on_hosts`: the processes on the hosts of an owner, which may have ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pufferfish.lab.network.hosts import TAG_VARIABLE


def on_hosts(owner: int) -> set[int]:
    tag, found = f"\0{TAG_VARIABLE}={owner}:".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if tag in b"\0" + (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found
