"""`Method`: the contract of a compression method: settings, messages to exchange, and what it may know of a step."""

import hashlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sum:
    """All-reduce. Answered with the sum over all workers, which may reuse the memory of `tensor`."""

    tensor: Tensor


@dataclass(frozen=True)
class Gather:
    """All-gather. Answered with a list of the tuples that the workers sent; treat them as read-only."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, tuple):
            raise TypeError("Gather takes a tuple of tensors, even for one tensor: Gather((x,))")


@dataclass(frozen=True)
class Scatter:
    """All-to-all. `pieces[j]` goes to worker j; answered with a list of the tuples that the workers sent to this one.

    The pieces for one worker have the same shapes on all workers.
    """

    pieces: tuple[tuple[Tensor, ...], ...]


Message = Sum | Gather | Scatter
#: A tensor, or two thin ones, (b, m, r) and (b, r, n), that the engine multiplies where their product is to be.
Mean = Tensor | tuple[Tensor, Tensor]
#: Yields messages, receives the answers, returns the mean and what this worker did not send.
MessageGenerator = Generator[Message, Any, tuple[Mean, Tensor | None]]


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


@dataclass
class StepContext:
    """One worker's view of one step, for one batch of tensors.

    >>> mine = StepContext(worker=1, size=2, step=7, names=("fc.weight",))
    >>> theirs = StepContext(worker=0, size=2, step=7, names=("fc.weight",))
    >>> a, b = (torch.rand(3, generator=ctx.shared_rng) for ctx in (mine, theirs))
    >>> torch.equal(a, b)
    True
    """

    worker: int
    size: int  # number of workers
    step: int
    names: tuple[str, ...]  # parameters in the batch
    dtype: torch.dtype = torch.float32  # of the gradients, before they were converted to fp32
    device: torch.device | str = "cpu"
    seed: int = 0
    #: Collective requested by the user, one of the method's `exchanges`; None: the method chooses.
    exchange: str | None = None
    error_feedback: bool = True  # whether the method's second result is kept and added to the next gradient
    #: Tensors of leading dimension b, kept from step to step. Insert new tensors, never change old ones in place:
    #: they take effect only if the step is finite on all workers.
    state: dict[str, Tensor] = field(default_factory=dict)
    #: `empty(shape, dtype)`: uninitialised memory on `device`, valid in this step only; never put it into `state`.
    empty: Callable[..., Tensor] = _empty

    @cached_property
    def shared_rng(self) -> torch.Generator:
        """Generator with the same seed on all workers."""
        return self._generator("all")

    @cached_property
    def own_rng(self) -> torch.Generator:
        """Generator with a seed of this worker's own."""
        return self._generator(str(self.worker))

    def _generator(self, stream: str) -> torch.Generator:
        text = "\n".join([str(self.seed), str(self.step), stream, *self.names])
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return torch.Generator(self.device).manual_seed(seed)

    def shards(self, x: Tensor, multiple: int = 1) -> Tensor:
        """Cut x (b, d) into one piece of every tensor for each worker: (size, b, s).

        Zero-padded, so that s is the same for all workers and a multiple of `multiple`.

        >>> StepContext(worker=0, size=2, step=0, names=()).shards(torch.arange(1, 6)[None]).tolist()
        [[[1, 2, 3]], [[4, 5, 0]]]
        """
        b, d = x.shape
        s = -(-d // (self.size * multiple)) * multiple
        return torch.nn.functional.pad(x, (0, s * self.size - d)).view(b, self.size, s).transpose(0, 1)

    def whole(self, shards: Sequence[Tensor], d: int) -> Tensor:
        """Join the workers' pieces (b, s) into the (b, d) that `shards` cut."""
        return torch.cat(list(shards), 1)[:, :d]


@dataclass(frozen=True)
class Kept:
    """Whose a tensor in `ctx.state` is and what it is rescaled with: an entry of a method's table `state`.

    Args:
        of: "own": this worker's. "shared": equal on all workers, and valid for another number of workers. "divided":
            this worker keeps it for all, so that its shape depends on the number of workers.
        follows: "units": it is in the gradients' units and rescaled with the error feedback when those change.
            "loss scale": it follows the loss scale but not the learning rate, such as a momentum. None: it is never
            rescaled.

    >>> Kept("shared")
    Kept(of='shared', follows=None)
    """

    of: Literal["own", "shared", "divided"] = "own"
    follows: Literal["units", "loss scale"] | None = None

    def __post_init__(self) -> None:
        if self.of not in ("own", "shared", "divided") or self.follows not in ("units", "loss scale", None):
            raise ValueError(
                f'{self!r}: of is "own", "shared" or "divided"; follows is "units", "loss scale" or None'
            )


@dataclass(frozen=True)
class Method:
    """A way to average gradients with fewer bytes. To add one, write a frozen dataclass with `compress`.

    >>> import torch
    >>> from pufferfish.compression import Settings, Simulated
    >>> @dataclass(frozen=True)
    ... class Int8(Method):  # one scale for each tensor
    ...     def compress(self, x, ctx):
    ...         scale = x.abs().amax(1, keepdim=True) / 127
    ...         q = (x / scale.clamp_min(1e-30)).round().to(torch.int8)
    ...         everyone = yield Gather((q, scale))
    ...         mean = sum(q_ * scale_ for q_, scale_ in everyone) / ctx.size
    ...         return mean, x - q * scale
    >>> two = Simulated(Settings(Int8(), smallest=0), workers=2)
    >>> two.average([{"w": torch.tensor([1.0, 0.5])}, {"w": torch.tensor([3.0, 0.0])}])[0]
    {'w': tensor([2.0, 0.252])}
    """

    #: What `compress` is given; with "vectors", "elements" and "matrices" all b tensors have one shape.
    #:
    #: - "vectors": x is (b, d).
    #: - "elements": the same, for methods that choose elements; with scope="global", among those of all tensors.
    #: - "matrices": x is (b, m, n), each gradient as a matrix (first dimension × the rest).
    #: - "row": elements are independent: all tensors, also 1-D and small ones, are one row (1, d).
    layout: ClassVar[Literal["vectors", "elements", "matrices", "row"]] = "vectors"
    #: Whether 1-D tensors, and those below `Settings.smallest`, are compressed too; a vector is a matrix's column.
    small_too: ClassVar[bool] = False
    #: What it keeps in `ctx.state`, by key. Other keys are each worker's own and follow nothing.
    state: ClassVar[Mapping[str, Kept]] = {}

    @property
    def has_momentum(self) -> bool:
        """Whether it has its own momentum, which an optimizer's momentum would multiply."""
        return False

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Collectives that a user may choose by `exchange=`, the default first.

        Each is "all_reduce", "all_gather" or "all_to_all". The method reads the choice from `ctx.exchange`.
        """
        return ()

    @property
    def kind(self) -> str:
        """Property of the method's error. Only "contraction" has error feedback.

        - "contraction": the rest is shorter than x.
        - "exact": nothing is lost. "rounding": the error is made inside the sum.
        - "unbiased": right on average. "clipped": the same, but for what is clipped.
        - "vote": the mean is ±1, whatever the magnitude.
        - "own": the method keeps its own error feedback, in `ctx.state`.
        """
        return "contraction"

    def keys(self, what: Literal["shared", "divided", "units", "loss scale"]) -> set[str]:
        """Keys of `ctx.state` that are shared or divided, or that follow the units or the loss scale."""
        return {key for key, kept in self.state.items() if what in (kept.of, kept.follows)}

    def unsent(self, state: Mapping[str, Tensor], shape: torch.Size, worker: int, size: int) -> Tensor | None:
        """Return the part of one parameter's gradients that `state` holds and that was not sent yet.

        It is added to the error feedback when another method takes over. None: there is no such part.
        """
        return None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape becomes smaller; otherwise it is sent uncompressed."""
        return True

    def compress(self, x: Tensor, ctx: StepContext) -> MessageGenerator:
        """Average b tensors of one shape.

        Args:
            x: Gradients plus error feedback: fp32 (fp64 for fp64 gradients), finite. The method may overwrite it.
            ctx: The worker's number, the step, random generators, and the state kept from the step before.

        Returns:
            The mean over the workers, in any float dtype, bit-identical on all of them; for matrices it may be two
            factors (see `Mean`). And the rest: the part of x that this worker did not send, which becomes its error
            feedback. None, for kinds other than "contraction": nothing is kept.
        """
        raise NotImplementedError


def check_whole(of: object, name: str, least: int = 1, most: float = math.inf, multiple: int = 1) -> None:
    """Raise ValueError if the setting `name` is not an integer in these limits, and a multiple of `multiple`."""
    value = getattr(of, name)
    if type(value) is not int or not least <= value <= most or value % multiple:
        limits = f"an integer ≥ {least}" if most == math.inf else f"an integer from {least} to {most}"
        also = f" and a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{type(of).__name__}: {name}={value!r} is not {limits}{also}")
