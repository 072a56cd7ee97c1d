"""One job of all hosts: a torchrun agent on each, their output in one place, all ended when one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hosts import Hosts

#: Seconds that an agent waits for an answer of the others before it gives up: torchrun's 60 are a short cut.
_PATIENCE = 600


def launch(
    hosts: Hosts,
    command: Sequence[str],
    *,
    per_host: int,
    env: Mapping[str, str],
    restarts: int,
    write: Callable[[str], object],
    grace: float,
) -> int:
    """See `Hosts.launch`."""
    if not command:
        raise ValueError("launch: there is no command; give a script, or '-m' and a module")
    if not 1 <= per_host <= 64:
        raise ValueError(f"{per_host} workers a host: choose 1 to 64")
    if restarts < 0:
        raise ValueError(f"{restarts} restarts: choose 0 or more")
    port = hosts.port()
    threads = max(1, (os.cpu_count() or 1) // (hosts.hosts * per_host))
    settings = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        ),  # agents that end first scare the others
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "NCCL_SOCKET_IFNAME": hosts.interface,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart on gloo finds the old store's keys otherwise
        **env,
    }
    agents: list[subprocess.Popen[str]] = []
    printers: list[threading.Thread] = []
    trouble: list[Exception] = []
    try:
        for host in range(hosts.hosts):
            line = [
                sys.executable, "-m", "torch.distributed.run",
                f"--nnodes={hosts.hosts}", f"--nproc-per-node={per_host}",
                # Without it agents look their names up, which leads to 127.0.0.1.
                f"--local-addr={hosts.address(host)}",
                *_meeting(host, hosts.address(0), port, restarts), *command,
            ]  # fmt: skip
            agent = hosts.run(host, line, settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            agents.append(agent)
            printers.append(threading.Thread(target=_print, args=(host, agent, write, trouble), daemon=True))
            printers[-1].start()
        while True:
            codes = [agent.poll() for agent in agents]
            failed = [code for code in codes if code]
            if failed or trouble or None not in codes:
                break
            time.sleep(0.02)
    finally:
        hosts.stop(grace)
        for printer in printers:
            printer.join()
    if trouble:
        raise trouble[0]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]  # as a shell says that a signal ended it


def _meeting(host: int, address: str, port: int, restarts: int) -> list[str]:
    """How the agents find one another.

    In torchrun's static way they meet once; while a link is cut each would restart its workers alone, again and
    again. In c10d's they wait for one another.
    """
    if not restarts:
        return [f"--node-rank={host}", f"--master-addr={address}", f"--master-port={port}"]
    more = f"is_host={int(host == 0)},read_timeout={_PATIENCE}"
    return [
        f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", f"--rdzv-conf={more}"
    ]  # fmt: skip


def _print(
    host: int, agent: subprocess.Popen[str], write: Callable[[str], object], trouble: list[Exception]
) -> None:
    assert agent.stdout is not None
    with agent.stdout as lines:
        for line in lines:  # to the end, else the workers wait for somebody to read
            try:
                write(f"host{host} | {line.rstrip()}")
            except Exception as error:
                trouble.append(error)
