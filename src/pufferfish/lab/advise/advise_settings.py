"""`AdviseSettings`: the arguments of `pufferfish advise`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..method_name import exchange_method
from ..network import LinkShape

MAX_WORKERS = 1024  # a dry run decodes the messages of all workers


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
