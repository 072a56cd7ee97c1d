"""Names of training methods in the advisor, such as `pufferfish+bf16, hierarchy=node`."""

from dataclasses import replace

from ...compression import NoCompression
from ...compression.settings import HierarchyLike
from ..train.training_method import TrainingMethod, training_method

LOW_RANK = "pufferfish"
#: Suffix of methods that average within each machine and compress between machines.
NODE = ", hierarchy=node"


def parse_method_name(name: str) -> tuple[TrainingMethod, HierarchyLike]:
    """The method and the hierarchy that a name stands for. In a hierarchy, plain averages use `NoCompression`.

    >>> parse_method_name("pufferfish, hierarchy=node")
    (TrainingMethod(name='pufferfish', model='pufferfish', compress=NoCompression(), scope='layer', local=None), 'node')
    >>> parse_method_name("dense")
    (TrainingMethod(name='dense', model='dense', compress=None, scope='layer', local=None), 'flat')
    """
    method = training_method(name.removesuffix(NODE))
    if not name.endswith(NODE):
        return method, "flat"
    return replace(method, compress=method.compress or NoCompression()), "node"


def is_local(name: str) -> bool:
    """Whether a name stands for local steps.

    >>> is_local("pufferfish+streaming-30x4"), is_local("bf16, hierarchy=node")
    (True, False)
    """
    return training_method(name.removesuffix(NODE)).local is not None


def warm_up_name(name: str) -> str:
    """The method that a low-rank method uses before its switch; other methods are returned unchanged.

    >>> names = ("pufferfish", "pufferfish+int8", "int8", "pufferfish+bf16, hierarchy=node")
    >>> [warm_up_name(name) for name in names]
    ['dense', 'int8', 'int8', 'bf16, hierarchy=node']
    """
    flat = name.removesuffix(NODE)
    model, _, compression = flat.partition("+")
    return name if model != LOW_RANK else (compression or "dense") + name[len(flat) :]


def simplicity(name: str) -> tuple[int, bool]:
    """Sort key: dense, bf16, low rank, then larger compression errors, then local steps; each without a hierarchy first.

    >>> sorted(["diloco-30", "int8", "pufferfish", "bf16, hierarchy=node", "bf16", "dense"], key=simplicity)
    ['dense', 'bf16', 'bf16, hierarchy=node', 'pufferfish', 'int8', 'diloco-30']
    """
    simple = ["dense", "bf16", LOW_RANK, f"{LOW_RANK}+bf16"]
    flat = name.removesuffix(NODE)
    last = len(simple) + is_local(flat)
    return simple.index(flat) if flat in simple else last, name.endswith(NODE)


def exchange_method(name: str) -> TrainingMethod:
    """Parse one of `--methods`: compression or local steps.

    >>> exchange_method("powersgd-4").compress, exchange_method("diloco-30").local.h
    (PowerSGD(rank=4, start=0), 30)
    """
    method = training_method(name)
    if (method.compress is None and method.local is None) or method.model != "dense":
        raise ValueError(
            f"--methods {name}: pass compression methods and local steps only; low rank and combinations are always tried"
        )
    return method
