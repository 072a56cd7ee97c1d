"""`launch`: one torchrun job on all hosts, with one agent per host; all end when one fails."""

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

#: Runs a module like `python -m`, with the working folder last in `sys.path`: it may hold a `torch.py`, for example.
#: On Linux, the process gets SIGTERM when its parent ends in any way (PR_SET_PDEATHSIG is 1): nothing outlives a kill.
_RUN_MODULE = (
    "import ctypes, runpy, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "sys.path.sort(key=lambda folder: not folder); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def launch(
    hosts: Hosts,
    command: Sequence[str],
    *,
    per_host: int = 1,
    env: Mapping[str, str] | None = None,
    write: Callable[[str], object] = print,
    grace: float = 10.0,
) -> int:
    """Run `torchrun command` as one job on all hosts, with an agent and `per_host` workers on each.

    When a host fails, or on ctrl-C, the job ends: agents get SIGTERM, and after `grace` seconds SIGKILL.

    Args:
        hosts: hosts of the job; this function is the method `Hosts.launch`.
        command: script and arguments, or "-m", module and arguments. Modules of the working folder do not replace others.
        per_host: workers on each host.
        env: variables added to the environment.
        write: called with every line of output, prefixed with the host.
        grace: seconds between SIGTERM and SIGKILL.

    Returns:
        0, or the exit code of the host that failed first.
    """
    if not command:
        raise ValueError("launch: the command is empty; pass a script, or '-m' and a module")
    if not 1 <= per_host <= 64:
        raise ValueError(f"workers per host must be between 1 and 64, got {per_host}")
    if command[0] == "-m":
        command = ["--no-python", sys.executable, "-c", _RUN_MODULE, *command[1:]]
    port = hosts.free_port()
    threads = max(1, (os.cpu_count() or 1) // (hosts.hosts * per_host))
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        # Hides the warnings of agents that outlive the one with the store.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "NCCL_SOCKET_IFNAME": hosts.interface,
        **(env or {}),
    }
    agents: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    write_errors: list[Exception] = []
    try:
        for host in range(hosts.hosts):
            agent_command = [
                sys.executable, "-c", _RUN_MODULE, "torch.distributed.run",
                f"--nnodes={hosts.hosts}", f"--nproc-per-node={per_host}",
                # Without it an agent resolves its host name, which gives 127.0.0.1.
                f"--local-addr={hosts.address(host)}",
                f"--node-rank={host}", f"--master-addr={hosts.address(0)}", f"--master-port={port}", *command,
            ]  # fmt: skip
            agent = hosts.run(
                host, agent_command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            agents.append(agent)
            readers.append(
                threading.Thread(target=_forward_output, args=(host, agent, write, write_errors), daemon=True)
            )
            readers[-1].start()
        while True:
            codes = [agent.poll() for agent in agents]
            failed = [code for code in codes if code]
            if failed or write_errors or None not in codes:
                break
            time.sleep(0.02)
    finally:
        hosts.stop(grace)
        for reader in readers:
            reader.join()
    if write_errors:
        raise write_errors[0]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]  # a shell's code for death by a signal


def _forward_output(
    host: int, agent: subprocess.Popen[str], write: Callable[[str], object], errors: list[Exception]
) -> None:
    assert agent.stdout is not None
    with agent.stdout as lines:
        for line in lines:  # read to the end even after an error, or workers block on a full pipe
            try:
                write(f"host{host} | {line.rstrip()}")
            except Exception as error:
                errors.append(error)
