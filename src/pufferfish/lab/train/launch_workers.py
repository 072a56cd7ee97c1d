"""`launch_workers`: run a command on workers of this machine, over the loopback or an emulated network."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..network import Hosts, Network, unavailable_reason
from .console import RELAYED, Console
from .output_relay import OutputRelay
from .signals import sigterm_as_sigint

#: Seconds that workers have to save a checkpoint when they are stopped.
GRACE_SECONDS = 60.0


def launch_workers(command: Sequence[str], *, network: str | None, hosts: int, per_host: int) -> int:
    """Run `command` (a script, or "-m" and a module, with arguments) on all workers and show their messages.

    Ctrl-C and SIGTERM stop the workers after a checkpoint; a second one ends them at once. No process is left behind.

    Args:
        network: link between the hosts, such as "100mbit"; None: the loopback.
        per_host: workers on each host.

    Returns:
        Exit code: 0; 2 if the workers reject their input; 130 if they were stopped; 1 otherwise.
    """
    console = Console()
    relay = OutputRelay(console)
    reason = unavailable_reason() if network else None
    if reason:
        console.info(f"network {network}: {reason}. Using the unshaped loopback instead")
    emulated = Hosts(hosts) if network is None or reason else Network(hosts, network)
    try:
        with sigterm_as_sigint(), emulated as machines:
            link = None
            if hosts > 1 and network is None:
                console.info(
                    "the hosts share the unshaped loopback; use --network to shape their links, such as --network 100mbit"
                )
            if hosts > 1:
                measured = machines.measure()
                link = asdict(measured)
                console.info(f"link: {measured}")
            console.progress(f"starting {hosts * per_host} workers …")  # which import torch for some seconds
            env = {RELAYED: json.dumps({"link": link, "hosts": hosts})}
            code = machines.launch(command, per_host=per_host, env=env, write=relay, grace=GRACE_SECONDS)
    except KeyboardInterrupt:
        return 130
    if not code or relay.errors:
        return 2 if relay.errors else 0
    failure = relay.failure_reason
    if relay.failure_output:
        print(relay.failure_output, file=sys.stderr)
        failure = "a worker has failed, see above"
    console.info(f"{failure}; rerun the same command to resume from the last checkpoint")
    return 1


def launch_info() -> dict[str, Any]:
    """Return what `launch_workers` passed to this worker: {"link", "hosts"}; empty for other workers.

    >>> launch_info()
    {}
    """
    return dict(json.loads(os.environ.get(RELAYED, "{}")))
