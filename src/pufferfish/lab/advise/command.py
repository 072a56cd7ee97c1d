"""What `pufferfish advise` does with its arguments: here alone, in a job of torchrun, or on emulated hosts."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...measure import Link
from ...planning.planner import plan
from ..network import Network, Shape, why_not
from ..train.process_group import Lost, job, place
from .advice import Advice
from .advise import METHODS, advise, check, method_of
from .networks import nominal
from .subject import subject

ENGINES = ("ddp", "fsdp2")
_MOST = 1024  # workers: a dry run decodes what all of them send


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's arguments."""

    task: str
    network: str | None = None  # None: the job's own
    nodes: int | None = None
    per_node: int | None = None
    engine: str = "ddp"
    methods: Sequence[str] | None = None  # None: those that are usual
    device: str = "cpu"
    precision: str = "fp32"
    batch: int | None = None
    data: Path | None = None
    recipe: str | None = None  # None: the short one
    keep: Sequence[str] | None = None
    steps: int | None = None
    out: Path | None = None
    json: bool = False
    check: bool = False
    emulated: str | None = None  # the link of the emulated hosts that this runs on

    def __post_init__(self) -> None:
        for name, number in (("nodes", self.nodes), ("per-node", self.per_node), ("steps", self.steps)):
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number}: take 1 or more")
        if (workers := (self.nodes or 1) * (self.per_node or 1)) > _MOST:
            raise ValueError(f"{workers:,} workers: nobody has tried; take {_MOST:,} or fewer")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU here; take --device cpu")
        if self.engine not in ENGINES:
            raise ValueError(f"--engine {self.engine}: there are {', '.join(ENGINES)}")
        if self.check and self.engine != "ddp":
            raise ValueError(
                f"--check runs DDP; what {self.engine} takes is predicted alone; leave --check out"
            )
        if self.methods and self.engine != "ddp":
            raise ValueError(f"--methods: with {self.engine} nothing is compressed but to bf16; leave it out")
        for word in self.methods or ():
            method_of(word)
        if self.network not in (None, "real"):
            Shape.parse(self.network)

    @property
    def shape(self) -> Shape | None:
        """Of a network that was named; None: the real one."""
        return None if self.network in (None, "real") else Shape.parse(self.network)


def run(asked: Asked) -> None:
    """Advise and print."""
    if "RANK" in os.environ:
        _in_job(asked)
        return
    if asked.shape is None:
        raise ValueError(
            f"{'--network real' if asked.network else 'advise'}: one process has no network; start it with torchrun, or "
            "name one: --network 10gbit"
        )
    if asked.nodes is None:
        raise ValueError(f"--network {asked.network}: of how many machines? Give --nodes N")
    if asked.check:
        _on_hosts(asked)
        return
    per_node = asked.per_node or 1
    about = subject(asked.task, size=asked.nodes * per_node, **_settings(asked))
    link = nominal(asked.shape, asked.nodes, per_node, asked.device)
    found = advise(
        about, link, network=str(asked.shape), nodes=asked.nodes, per_node=per_node, engine=asked.engine,
        methods=asked.methods or METHODS,
    )  # fmt: skip
    _tell(found, asked)


def _in_job(asked: Asked) -> None:
    """On every rank: computing is measured on all of them at once."""
    if asked.check and asked.shape is not None:
        raise ValueError("--check in a job runs on its own network; leave --network out")
    place(asked.device)
    with _told_who_is_lost(), job(asked.device) as size:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        there = max(1, size // local), local
        nodes, per_node = asked.nodes or there[0], asked.per_node or there[1]
        if asked.shape is None and (nodes, per_node) != there:
            raise ValueError(
                f"--network real: this job has {there[0]} × {there[1]} workers, not {nodes} × {per_node}; leave "
                "--nodes and --per-node out, or name the network"
            )
        if nodes * per_node < size:
            raise ValueError(
                f"--nodes {nodes} --per-node {per_node}: this job has {size} workers already; ask for as many or more"
            )
        about = subject(asked.task, rank=dist.get_rank(), size=nodes * per_node, **_settings(asked))
        found = advise(
            about, _link(asked, nodes, per_node), network=asked.emulated or asked.network or "real", nodes=nodes,
            per_node=per_node, engine=asked.engine, methods=asked.methods or METHODS,
        )  # fmt: skip
        if asked.check:
            found = check(found, about)
        if dist.get_rank() == 0:
            _tell(found, asked)
        gc.collect()  # a DDP object that outlives its group may hang
        dist.barrier()  # nobody leaves while another still talks


@contextlib.contextmanager
def _told_who_is_lost() -> Iterator[None]:
    try:
        yield
    except Lost as error:
        raise OSError(f"a worker has failed, or cannot be reached: {error}") from None


def _link(asked: Asked, nodes: int, per_node: int) -> Link | None:
    """None: what the job finds."""
    if asked.shape is not None:
        return nominal(asked.shape, nodes, per_node, asked.device)
    if dist.get_world_size() == 1:
        return nominal(Shape(10_000), 1, 1, asked.device)
    return None


def _on_hosts(asked: Asked) -> None:
    """The same command as a job of emulated hosts: computing is measured there too, as they share this machine."""
    assert asked.shape is not None
    assert asked.nodes is not None
    if asked.device != "cpu":
        raise ValueError(
            "--check: emulated hosts have CPUs only; take --device cpu, or run it under torchrun on the real network"
        )
    asked.shape.check()
    if reason := why_not():
        raise OSError(f"--check: network {asked.shape}: {reason}; run it under torchrun on the real network")
    # What is wrong with the task is said here, once, before there are hosts.
    about = subject(asked.task, size=asked.nodes * (asked.per_node or 1), **_settings(asked))
    plan(about.build(), about.rank, keep=about.keep)

    def write(line: str) -> None:
        host, _, text = line.partition(" | ")
        if host == "host0":
            print(text, flush=True)

    there = replace(asked, network="real", nodes=None, per_node=None, emulated=str(asked.shape))
    with Network(asked.nodes, asked.shape) as network:
        command = ["-m", __name__, json.dumps(asdict(there), default=str)]
        code = network.launch(
            command, per_host=asked.per_node or 1, env={"PYTHONWARNINGS": "ignore"}, write=write
        )
    if code:
        raise OSError(f"--check: the job on emulated hosts failed with exit code {code}")


def _settings(asked: Asked) -> dict[str, Any]:
    names = ("device", "precision", "recipe", "batch", "data", "keep", "steps")
    return {name: getattr(asked, name) for name in names}


def _tell(found: Advice, asked: Asked) -> None:
    print(json.dumps(found.as_dict(), indent=1) if asked.json else found)
    if asked.out is None:
        return
    told = f"No layer should be low-rank here: {asked.out} was not written."
    if found.plan is not None:
        found.plan.save(asked.out)
        told = f"The plan is in {asked.out}, for pf.Switch(plan=pf.Plan.load(…))."
    if not (asked.json and asked.emulated):  # a host's lines all go to one place
        print(told, file=sys.stderr if asked.json else sys.stdout)


if __name__ == "__main__":  # on an emulated host
    given: dict[str, Any] = json.loads(sys.argv[1])
    given |= {name: Path(given[name]) for name in ("data", "out") if given[name] is not None}
    run(Asked(**given))
