"""`run_advise`: `pufferfish advise` in one process, in a torchrun job, or on emulated hosts."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...measure import AlphaBeta, Link
from ...planning import plan
from ...planning.text import progress
from ..network import LinkShape, Network, unavailable_reason
from ..train.workers import WorkersUnreachable, process_group, worker_device
from .advice import Advice
from .advisor import METHODS, Workload, advise, check, exchange_method, load_workload


def run_advise(settings: AdviseSettings, show: Callable[[Advice], object] = print) -> None:
    """Print the advice by `show`, or as JSON, and save its plan if `settings.out` is set."""
    if "RANK" in os.environ:
        try:
            _run_in_job(settings, show)
        except WorkersUnreachable as error:
            raise OSError(f"a worker failed or cannot be reached: {error}") from None
        return
    if settings.link_shape is None:
        flag = "--network real: " if settings.network else ""
        raise ValueError(
            f"{flag}a single process has no network; use torchrun, or pass --network, such as 10gbit"
        )
    if settings.nodes is None:
        raise ValueError(f"--network {settings.network}: the number of machines is missing; pass --nodes")
    if settings.check:
        _run_on_emulated_hosts(settings)
        return
    per_node = settings.per_node or 1
    link = nominal_link(settings.link_shape, settings.nodes, per_node, settings.device)
    workload = _load(settings, settings.nodes * per_node)
    advice = advise(
        workload, link, network=str(settings.link_shape), nodes=settings.nodes, per_node=per_node,
        methods=settings.methods or METHODS,
    )  # fmt: skip
    _print_and_save(advice, settings, show)


def _run_in_job(settings: AdviseSettings, show: Callable[[Advice], object]) -> None:
    """Runs on every worker; all of them measure their compute at the same time."""
    if settings.check and settings.link_shape is not None:
        raise ValueError("--check runs a torchrun job on its own network; remove --network")
    worker_device(settings.device)
    with process_group(settings.device) as size:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        job = max(1, size // local), local
        nodes, per_node = settings.nodes or job[0], settings.per_node or job[1]
        if settings.link_shape is None and (nodes, per_node) != job:
            raise ValueError(
                f"--network real: this job has {job[0]} × {job[1]} workers, not {nodes} × {per_node}; remove --nodes and "
                "--per-node, or name another network"
            )
        if nodes * per_node < size:
            raise ValueError(
                f"--nodes {nodes} --per-node {per_node}: this job has {size} workers; pass at least as many"
            )
        workload = _load(settings, nodes * per_node, dist.get_rank())
        advice = advise(
            workload, _link(settings, nodes, per_node), network=settings.emulated or settings.network or "real",
            nodes=nodes, per_node=per_node, methods=settings.methods or METHODS,
        )  # fmt: skip
        if settings.check:
            advice = check(advice, workload)
        if dist.get_rank() == 0:
            _print_and_save(advice, settings, show)
        gc.collect()  # a DDP object that outlives its process group can hang
        dist.barrier()  # no worker leaves while another one communicates


def _link(settings: AdviseSettings, nodes: int, per_node: int) -> Link | None:
    """The nominal link; None: probe that of the job."""
    if settings.link_shape is not None:
        return nominal_link(settings.link_shape, nodes, per_node, settings.device)
    if dist.get_world_size() == 1:
        return nominal_link(LinkShape(10_000), 1, 1, settings.device)
    return None


def _run_on_emulated_hosts(settings: AdviseSettings) -> None:
    """Run the same command as a job on emulated hosts. Compute is measured there too, as the hosts share this machine."""
    shape, nodes, per_node = settings.link_shape, settings.nodes, settings.per_node or 1
    assert shape is not None
    assert nodes is not None
    if settings.device != "cpu":
        raise ValueError(
            "--check: emulated hosts have no GPUs; use --device cpu, or run under torchrun on a real network"
        )
    shape.check_emulable()
    if reason := unavailable_reason():
        raise OSError(f"--check: cannot emulate {shape}: {reason}; run under torchrun on a real network")
    # Errors of the workload are raised here, before the hosts are started.
    workload = _load(settings, nodes * per_node)
    plan(workload.build(), workload.rank, keep=workload.keep)

    lines: list[str] = []  # printed at the end, when no progress bar is in their way

    def write(line: str) -> None:
        host, _, text = line.partition(" | ")
        if host == "host0":
            lines.append(text)

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    job = replace(settings, network="real", nodes=None, per_node=None, emulated=str(shape), width=width)
    command = ["-m", __name__, json.dumps(asdict(job), default=str)]
    try:
        with progress(f"measuring on {nodes} emulated hosts", None), Network(nodes, shape) as network:
            code = network.launch(command, per_host=per_node, env={"PYTHONWARNINGS": "ignore"}, write=write)
    finally:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    if code:
        raise OSError(f"--check: the job on emulated hosts failed with exit code {code}")


def _load(settings: AdviseSettings, size: int, rank: int = 0) -> Workload:
    names = ("device", "precision", "recipe", "batch", "data", "keep", "steps")
    arguments = {name: getattr(settings, name) for name in names}
    return load_workload(settings.task, rank=rank, size=size, **arguments)


def _print_and_save(advice: Advice, settings: AdviseSettings, show: Callable[[Advice], object]) -> None:
    if settings.out is not None:
        advice = replace(advice, plan_file=str(settings.out))
    if settings.json:
        print(json.dumps(advice.as_dict(), indent=1))
    else:
        show(advice)
    if settings.out is None:
        return
    message = f"No layer should be low-rank here: {settings.out} was not written."
    if advice.plan is not None:
        advice.plan.save(settings.out)
        message = f"Plan saved to {settings.out}."
    if not (settings.json and settings.emulated):  # both streams of a host are merged into one
        print(message, file=sys.stderr if settings.json else sys.stdout)


@dataclass(frozen=True, kw_only=True)
class AdviseSettings:
    """The arguments of `pufferfish advise`, checked.

    >>> AdviseSettings(task="digits", network="100mbit,delay=1ms", nodes=4).link_shape
    LinkShape(mbit=100.0, delay_ms=1.0)
    """

    task: str
    network: str | None = None  # None or "real": that of the job
    nodes: int | None = None
    per_node: int | None = None
    methods: Sequence[str] | None = None  # None: the default methods
    device: str = "cpu"
    precision: str = "fp32"
    batch: int | None = None
    data: Path | None = None
    recipe: str | None = None  # None: "short"
    keep: Sequence[str] | None = None
    steps: int | None = None
    out: Path | None = None
    json: bool = False
    check: bool = False
    width: int | None = None  # of the terminal; None: lines of any length
    emulated: str | None = None  # link of the emulated hosts on which this process runs

    def __post_init__(self) -> None:
        for name, number in (("nodes", self.nodes), ("per-node", self.per_node), ("steps", self.steps)):
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number}: must be at least 1")
        if (workers := (self.nodes or 1) * (self.per_node or 1)) > MAX_WORKERS:
            raise ValueError(f"{workers:,} workers: not supported; use at most {MAX_WORKERS:,}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU; use --device cpu")
        for name in self.methods or ():
            exchange_method(name)
        if self.network not in (None, "real"):
            LinkShape.parse(self.network)

    @property
    def link_shape(self) -> LinkShape | None:
        """The network to predict for; None: the network of the job."""
        return None if self.network in (None, "real") else LinkShape.parse(self.network)


#: Seconds of software overhead per message: gloo on CPUs, NCCL on GPUs.
OVERHEAD = {"cpu": 1e-4, "cuda": 3e-5}
#: Assumed bits per second between the workers of one machine.
INTRA_NODE_BANDWIDTH = 1e11


def nominal_link(shape: LinkShape, nodes: int, per_node: int, device: str = "cpu") -> Link:
    """The link of `nodes` machines, whose `per_node` workers share one network connection of this shape.

    In a ring, one worker of a machine sends to the next machine; in an all-to-all, all of them send at the same time.

    >>> link = nominal_link(LinkShape.parse("10gbit"), nodes=4, per_node=8)
    >>> link.size, round(link.bandwidth / 1e9, 2), link.extrapolated
    (32, 9.49, True)
    """
    size, overhead = nodes * per_node, OVERHEAD.get(device.partition(":")[0], 3e-5)
    if nodes == 1:
        link = Link.nominal(bandwidth=INTRA_NODE_BANDWIDTH, latency=overhead, size=size)
        return replace(link, per_node=size)
    delay = shape.delay_ms / 1e3
    link = Link.nominal(bandwidth=1e6 * shape.mbit, latency=delay + overhead, size=size)
    ring = link.collectives["all_reduce"]
    outside = (size - per_node) / (size - 1)  # fraction of a worker's peers on other machines
    all_to_all = replace(ring, beta=ring.beta * max(1.0, per_node * outside))
    link = replace(link, collectives={"all_reduce": ring, "all_gather": ring, "all_to_all": all_to_all})
    if per_node == 1:
        return link
    intra_node = {"all_reduce": AlphaBeta(alpha=overhead, beta=8 / INTRA_NODE_BANDWIDTH)}
    return replace(link, per_node=per_node, intra_node=intra_node, inter_node={"all_reduce": ring})


if __name__ == "__main__":  # on an emulated host
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    arguments |= {name: Path(arguments[name]) for name in ("data", "out") if arguments[name] is not None}
    settings = AdviseSettings(**arguments)
    run_advise(
        settings, lambda advice: print(advice if settings.width is None else advice.text(settings.width))
    )

MAX_WORKERS = 1024  # a dry run decodes the messages of all workers
