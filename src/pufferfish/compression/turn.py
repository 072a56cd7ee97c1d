"""`Turn`: what a method may know of the step it is in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Turn:
    """One worker's view of one step, for one batch of tensors.

    >>> turn = Turn(rank=1, size=2, step=7, names=("fc.weight",))
    >>> again = Turn(rank=0, size=2, step=7, names=("fc.weight",))
    >>> a, b = (torch.rand(3, generator=t.shared) for t in (turn, again))
    >>> torch.equal(a, b)
    True
    """

    rank: int
    size: int
    step: int
    names: tuple[str, ...]
    dtype: torch.dtype = torch.float32  # of the gradients themselves
    device: torch.device | str = "cpu"
    seed: int = 0
    #: The collective the user asks for, of the method's `exchanges`; None: its own choice.
    exchange: str | None = None
    units: tuple[
        float, ...
    ] = ()  # loss scale over learning rate, of each; 0, or nothing at all, where it is not known
    memory: bool = True  # whether what is not sent may be kept
    #: Tensors of leading dimension b, kept from step to step. Put new ones in, never change old ones in place:
    #: they take effect only if the step turns out finite on all workers.
    state: dict[str, Tensor] = field(default_factory=dict)
    scratch: list[Tensor] = field(default_factory=list)
    _given: int = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory for this step only, never for what is kept.

        On a CPU it is that of the step before: fresh memory costs several times a copy there, its pages have to be
        made first. Other devices have allocators that see to it.

        >>> Turn(rank=0, size=1, step=0, names=()).empty((2, 3)).shape
        torch.Size([2, 3])
        """
        if torch.device(self.device).type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._given == len(self.scratch):
            self.scratch.append(torch.empty(0, dtype=torch.uint8))
        if len(self.scratch[self._given]) < nbytes:
            self.scratch[self._given] = torch.empty(nbytes, dtype=torch.uint8)
        self._given += 1
        return self.scratch[self._given - 1][:nbytes].view(dtype).view(tuple(shape))

    @cached_property
    def shared(self) -> torch.Generator:
        """Random numbers that are the same on all workers."""
        return self._generator("all")

    @cached_property
    def own(self) -> torch.Generator:
        """Random numbers of this worker alone."""
        return self._generator(str(self.rank))

    def lends(self, x: Tensor) -> bool:
        """Whether x is the first thing that `empty` gave, whole."""
        return (
            bool(self.scratch)
            and self.scratch[0].data_ptr() == x.data_ptr()
            and self.scratch[0].nbytes == x.nbytes
        )

    def swap(self, mine: Tensor, other: Tensor) -> Tensor:
        """Keep what `empty` gave first; from the next step on it gives `other` in its place."""
        self.scratch[0] = other.view(-1).view(torch.uint8)
        return mine

    def _generator(self, whose: str) -> torch.Generator:
        text = "\n".join([str(self.seed), str(self.step), whose, *self.names])
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return torch.Generator(self.device).manual_seed(seed)

    def shards(self, x: Tensor, multiple: int = 1) -> Tensor:
        """x (b, d) cut into one piece of every tensor for each worker: (size, b, s).

        Filled up with zeros, so that s is the same for all and a multiple of `multiple`.

        >>> Turn(rank=0, size=2, step=0, names=()).shards(torch.arange(1, 6)[None]).tolist()
        [[[1, 2, 3]], [[4, 5, 0]]]
        """
        b, d = x.shape
        s = -(-d // (self.size * multiple)) * multiple
        return torch.nn.functional.pad(x, (0, s * self.size - d)).view(b, self.size, s).transpose(0, 1)

    def whole(self, shards: Sequence[Tensor], d: int) -> Tensor:
        """The (b, d) that was cut by `shards`, from the workers' pieces (b, s)."""
        return torch.cat(list(shards), 1)[:, :d]
