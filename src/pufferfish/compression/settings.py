"""Which memory and scope go with which method: one table, and an error with the reason for what makes no sense."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any

from .method import Method
from .methods.casts import NoCompression

#: What a method's error is like → why it has no memory; "" where it has one unless it is switched off.
KINDS = {
    "contraction": "",
    "exact": "it loses nothing",
    "rounding": "what it loses is lost inside the sum, where no worker sees it",
    "unbiased": "its errors average out by themselves; a memory would send them again and add their noise up",
    "clipped": "what it cuts off is meant to be lost, and the rest averages out by itself",
    "vote": "a vote says nothing about sizes, so there is no rest to keep",
    "own": "it keeps one of its own",
}

#: Collective → why a method that does not name it cannot do with it.
EXCHANGES = {
    "all_reduce": "its messages cannot be summed on the way",
    "all_gather": "what it sends is summed on the way; gathering would cost more with every worker",
    "all_to_all": "it has nothing that an owner of each shard could sum up",
}

#: One method, or name pattern → method.
Methods = Method | Mapping[str, Method]


def has_memory(method: Method, memory: bool | None) -> bool:
    """Whether this method runs with a memory; None asks for what suits it.

    >>> from pufferfish.compression import QSGD, TopK
    >>> has_memory(TopK(), None), has_memory(TopK(), False), has_memory(QSGD(), None)
    (True, False, False)
    >>> has_memory(QSGD(), True)
    Traceback (most recent call last):
    ValueError: QSGD goes without a memory: its errors average out by themselves; ...
    """
    why_not = KINDS[method.kind]
    if memory and why_not:
        raise ValueError(f"{type(method).__name__} goes without a memory: {why_not}; leave memory=None")
    return not why_not if memory is None else memory


def by_pattern(methods: Methods) -> dict[str, Method]:
    """Name pattern → method, for one method or several."""
    return dict(methods) if isinstance(methods, Mapping) else {"*": methods}


def check(methods: Methods, memory: bool | None, scope: str, exchange: str | None = None) -> None:
    """Refuse combinations that make no sense, before anything runs."""
    if exchange is not None and exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is not one of {', '.join(EXCHANGES)}")
    if scope not in ("layer", "global"):
        raise ValueError(f'scope={scope!r} is neither "layer" nor "global"')
    if isinstance(methods, Mapping) and not methods:
        raise ValueError(
            "a mapping of methods needs at least one pattern; NoCompression() leaves all as it is"
        )
    for pattern, method in by_pattern(methods).items():
        name: Any = getattr(method, "__name__", type(method).__name__)
        if not isinstance(method, Method) or not dataclasses.is_dataclass(method):
            place = f", for {pattern!r}," if isinstance(methods, Mapping) else ""
            hint = f"; write {name}()" if isinstance(method, type) else ""
            hint = "; write pf.compression.PowerSGD(…) or alike" if isinstance(method, str) else hint
            raise TypeError(f"{name}{place} is not a compression method{hint}")
        if method.kind not in KINDS:
            raise ValueError(f"{name}: kind {method.kind!r} is not one of {', '.join(KINDS)}")
        has_memory(method, memory)
        if exchange is not None and exchange not in method.exchanges:
            can = f"it has {', '.join(method.exchanges)}" if method.exchanges else "leave exchange=None"
            raise ValueError(f"{name} does not go by {exchange}: {EXCHANGES[exchange]}; {can}")
        if scope == "global" and not method.sparse:
            raise ValueError(
                f'{name} treats every tensor on its own; scope="global" is for methods that choose elements'
            )


def check_numbers(**settings: Any) -> None:
    """Refuse what is no count."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}={value!r} is not a whole number ≥ 0")


def check_words(nonfinite: Any, overlap: Any, at_once: bool) -> None:
    """Refuse other words than there are, and overlap where all gradients are needed `at_once`."""
    if nonfinite not in ("nan", "zero"):
        raise ValueError(f'nonfinite={nonfinite!r} is neither "nan" nor "zero"')
    if overlap not in (None, True, False):
        raise ValueError(f"overlap={overlap!r} is none of None, True, False")
    if overlap and at_once:
        raise ValueError(
            'overlap=True: scope="global" and levels="node" need all gradients at once; leave overlap=None'
        )


def matches(name: str, pattern: str) -> bool:
    """A pattern names a parameter or a module that it is in.

    >>> [matches("block.fc.weight", pattern) for pattern in ("block.fc.weight", "*.fc", "block", "fc")]
    [True, True, True, False]
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def choose(methods: Methods, names: Iterable[str]) -> dict[str, Method]:
    """The method for each parameter: that of the first pattern that matches, or none.

    >>> from pufferfish.compression import PowerSGD, TopK
    >>> chosen = choose({"embed": TopK(), "*": PowerSGD(2)}, ["embed.weight", "fc.weight"])
    >>> chosen["fc.weight"]
    PowerSGD(rank=2)
    """
    patterns = by_pattern(methods)
    return {
        name: next((m for pattern, m in patterns.items() if matches(name, pattern)), NoCompression())
        for name in names
    }


def refuse_unmatched(methods: Methods, names: Iterable[str]) -> None:
    """A pattern that means nothing here is a mistake."""
    names = list(names)
    left = set(names)
    for pattern in by_pattern(methods) if names and isinstance(methods, Mapping) else ():
        mine = {name for name in names if matches(name, pattern)}
        if mine and not mine & left and pattern != "*":  # which is for what others have left, if anything
            raise ValueError(
                f"the pattern {pattern!r} comes after others that match all it does, and the first counts; put it before"
            )
        left -= mine
        if not mine:
            raise ValueError(
                f"the pattern {pattern!r} matches no parameter; there are {', '.join(names[:5])} …"
            )


def warn_of_idle(methods: Methods, used: Set[Method], smallest: int) -> None:
    """A method that nothing goes through is a mistake too, but of what a model has."""
    for method in by_pattern(methods).values():
        if method not in used:
            warnings.warn(
                f"{method!r} compresses nothing here: what it is for is 1-D, below smallest={smallest} elements or would "
                "not become smaller, and travels as it is",
                stacklevel=5,
            )
