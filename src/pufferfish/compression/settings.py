"""`Settings`: what experts choose about compression, checked where it is built, and which method a name gets."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..layers import matches
from .method import Method
from .methods.sums import NoCompression

#: What a method's `compress` may ask to be given; see `Method.layout`.
LAYOUTS = ("vectors", "elements", "matrices", "row")
#: Kind of compression error → why methods of that kind have no error feedback; "": they have it by default.
KINDS = {
    "contraction": "",
    "exact": "it loses nothing",
    "rounding": "the error is made inside the sum, where no worker sees it",
    "unbiased": "its errors average out; error feedback would send them again and add their noise",
    "clipped": "what it clips is meant to be lost, and the remaining error averages out",
    "vote": "a vote has no magnitude, so there is no rest to keep",
    "own": "it has its own",
}

#: Bytes of the first bucket, where several are sent one after the other.
FIRST_BUCKET = 2**20

#: One method, or a mapping name pattern → method.
Methods = Method | Mapping[str, Method]
HierarchyLike = Literal["flat", "node"]


@dataclass(frozen=True)
class Settings:
    """Settings for averaging gradients. Invalid combinations raise ValueError or TypeError here.

    Args:
        method: A method, or a mapping name pattern → method, in which the first match counts. Parameters that match
            no pattern are sent uncompressed. Patterns match parameter or module names. Leave it out where the method
            is an argument of its own, as in `compress`.
        error_feedback: None: as suits the method. False: off.
        scope: "layer", or "global": a sparsifier chooses among the elements of all tensors.
        exchange: For methods that support several collectives: "all_to_all" (owners sum their shard, compress it again
            and send it to all) or "all_gather" (everything goes to everyone, compressed once). None: the method's default.
        hierarchy: "node": workers of one machine (LOCAL_WORLD_SIZE, consecutive ranks) average uncompressed, and the first
            of them exchanges the mean with the other machines. Error feedback is that worker's.
        seed: Seed of the methods' random numbers. The global generators are never used.
        smallest: 1-D tensors, and tensors with fewer elements, are sent uncompressed (except in 16-bit averages
            and `SparseLoCo`).
            0 compresses everything that the method can.
        nonfinite: "nan": if any worker's gradients are not finite, all results are NaN. "zero": all are zero, for loops
            that do not check.
        overlap: True: buckets of 25 MiB (the first: 1 MiB) are sent during the backward pass; methods with several rounds
            finish after it. False: everything is sent after it, in the fewest messages. None: True for uncompressed
            and 16-bit averages.
        scaler: The `GradScaler` of the training loop, so that error feedback follows its scale.

    >>> from pufferfish.compression import QSGD
    >>> Settings(QSGD(), error_feedback=True)
    Traceback (most recent call last):
    ValueError: QSGD works without error feedback: its errors average out; ...
    """

    method: Methods | None = None
    _: dataclasses.KW_ONLY
    error_feedback: bool | None = None
    scope: Literal["layer", "global"] = "layer"
    exchange: str | None = None
    hierarchy: HierarchyLike = "flat"
    seed: int = 0
    smallest: int = 1024
    nonfinite: Literal["nan", "zero"] = "nan"
    overlap: bool | None = None
    scaler: Any = dataclasses.field(default=None, repr=False, compare=False)  # each worker has its own

    def __post_init__(self) -> None:
        choices = {"scope": ("layer", "global"), "nonfinite": ("nan", "zero"), "hierarchy": ("flat", "node")}
        for name, words in choices.items():
            if getattr(self, name) not in words:
                raise ValueError(f'{name}={getattr(self, name)!r} is neither "{words[0]}" nor "{words[1]}"')
        if self.overlap and (self.scope == "global" or self.hierarchy != "flat"):
            raise ValueError(
                'overlap=True: scope="global" and hierarchy="node" need all gradients at once; leave overlap=None'
            )
        if self.scaler is not None and not hasattr(self.scaler, "get_scale"):
            raise TypeError(f"scaler is a {type(self.scaler).__name__}, not a GradScaler")
        for pattern, method in self.by_pattern.items():
            self._check(method, pattern)

    def _check(self, method: Any, pattern: str) -> None:
        name = getattr(method, "__name__", type(method).__name__)
        if not isinstance(method, Method) or not dataclasses.is_dataclass(method):
            place = f", for {pattern!r}," if isinstance(self.method, Mapping) else ""
            hint = f"; write {name}()" if isinstance(method, type) else ""
            raise TypeError(f"{name}{place} is not a compression method{hint}")
        for attribute, words in {"layout": LAYOUTS, "kind": tuple(KINDS)}.items():
            if getattr(method, attribute) not in words:
                raise ValueError(
                    f"{name}: {attribute}={getattr(method, attribute)!r} is none of {', '.join(words)}"
                )
        if self.error_feedback and KINDS[method.kind]:
            raise ValueError(
                f"{name} works without error feedback: {KINDS[method.kind]}; leave error_feedback=None"
            )
        if self.exchange is not None and self.exchange not in method.exchanges:
            hint = f"it supports {', '.join(method.exchanges)}" if method.exchanges else "leave exchange=None"
            raise ValueError(f"{name} does not support exchange={self.exchange!r}; {hint}")
        if self.scope == "global" and method.layout != "elements":
            raise ValueError(
                f'{name} compresses every tensor separately; scope="global" is for methods that choose elements'
            )

    @property
    def by_pattern(self) -> dict[str, Method]:
        """Name pattern → method, for none, one or several."""
        if self.method is None:
            return {}
        return dict(self.method) if isinstance(self.method, Mapping) else {"*": self.method}

    def has_error_feedback(self, method: Method) -> bool:
        """Whether `method` runs with error feedback under these settings.

        >>> from pufferfish.compression import QSGD, TopK
        >>> settings = Settings(TopK())
        >>> settings.has_error_feedback(TopK()), settings.has_error_feedback(QSGD())
        (True, False)
        """
        return self.error_feedback is not False and not KINDS[method.kind]

    def choose(self, names: Iterable[str]) -> dict[str, Method]:
        """Return the method of each parameter: that of the first pattern that matches, or `NoCompression`.

        >>> from pufferfish.compression import PowerSGD, TopK
        >>> settings = Settings({"embed": TopK(), "*": PowerSGD(2)})
        >>> settings.choose(["embed.weight", "fc.weight"])["fc.weight"]
        PowerSGD(rank=2, start=0, bf16=False)
        """
        patterns = self.by_pattern
        return {
            name: next((m for pattern, m in patterns.items() if matches(name, pattern)), NoCompression())
            for name in names
        }

    def compresses(self, method: Method, shape: torch.Size) -> bool:
        """Whether `method` compresses a tensor of this shape; otherwise it is sent uncompressed."""
        if method.layout == "row":
            return True
        small = self.smallest > 0 and (len(shape) < 2 or shape.numel() < self.smallest)
        vector = method.layout == "matrices" and len(shape) < 2
        exempt = len(shape) == 0 if method.small_too else small or vector
        return not exempt and method.fits(shape)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches none of `names`, or only names that earlier patterns match."""
        names = list(names)
        left = set(names)
        for pattern in self.by_pattern if names and isinstance(self.method, Mapping) else ():
            mine = {name for name in names if matches(name, pattern)}
            if mine and not mine & left and pattern != "*":  # "*" may be for what is left, if anything
                raise ValueError(
                    f"the pattern {pattern!r} comes after patterns that match the same parameters, and the first match "
                    "counts; put it first"
                )
            left -= mine
            if not mine:
                raise ValueError(
                    f"the pattern {pattern!r} matches no parameter; the parameters are {', '.join(names[:5])} …"
                )

    def warn_unused(self, used: Set[Method], stacklevel: int) -> None:
        """Warn about methods that compress no parameter of the model."""
        for method in self.by_pattern.values():
            if method not in used:
                warnings.warn(
                    f"{method!r} compresses nothing here: its parameters are 1-D, have fewer than "
                    f"smallest={self.smallest} elements or would not become smaller, and are sent uncompressed",
                    stacklevel=stacklevel,
                )


def make_buckets(gradients: Mapping[str, Tensor], nbytes: int | None) -> list[list[str]]:
    """Names of the gradients that are sent together, in reverse order: the last layers' gradients are ready first.

    The first bucket is small, like DDP's, so that the link is used early; not where all gradients are small, because
    that would only add a message. `nbytes` None: one bucket.

    >>> make_buckets({"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2)}, 16)
    [['c', 'b'], ['a']]
    >>> make_buckets(dict.fromkeys("abcd", torch.empty(4, 2**20, dtype=torch.int8)), 2**23)
    [['d'], ['c', 'b'], ['a']]
    """
    if nbytes is None:
        return [list(reversed(list(gradients)))]
    small = sum(x.nbytes for x in gradients.values()) < 8 * FIRST_BUCKET
    buckets: list[list[str]] = [[]]
    size, limit = 0, nbytes if small else min(FIRST_BUCKET, nbytes)
    for name in reversed(list(gradients)):
        if size >= limit:
            buckets.append([])
            size, limit = 0, nbytes
        buckets[-1].append(name)
        size += gradients[name].nbytes
    return buckets
