"""What `pufferfish methods` shows: every compression method, what it hands over, and what that saves on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compression import Accordion, Aggregator, Meter, Method, NoCompression, PowerSGD
from ...compression.parse_method import known, method_from
from ...compression.settings import has_memory
from ...compression.transport import Coming, Transport
from ...planning.table import aligned

SHAPE = (1024, 1024)
#: Of the gradients, which are normal numbers: one element in a hundred is beyond Threshold's default τ = 0.001.
SIGMA = 1e-3 / 2.5758

NOTE = f"""\
Counted in the first step, on a gradient of {SHAPE[0]}×{SHAPE[1]} normal numbers with σ = {SIGMA:.2g}. On the left, the bits
for each element that one of {{}} workers hands to the collectives; on the right, how many times fewer bytes there
are on the wire than in an fp32 ring all-reduce (below 1: more). Threshold's depend on the gradients, low-rank methods'
on the shape; Accordion is in its light period."""


def named(texts: Sequence[str]) -> list[Method]:
    """The methods that users name; without any, all of the package, with their defaults.

    >>> named(["PowerSGD(2)", "BFloat16"])
    [PowerSGD(rank=2), BFloat16()]
    """
    example = Accordion(PowerSGD(4), PowerSGD(1), every=1000)  # it has no defaults
    everything = [example if kind is Accordion else kind() for kind in known().values()]
    return [method_from(text) for text in texts] or everything


def table(methods: Sequence[Method], workers: Sequence[int] = (2, 8, 64)) -> str:
    """A line for each method.

    >>> print(table([PowerSGD(rank=4)], workers=[2, 64]))
    method            memory  bits an element    2 workers  64 workers
    PowerSGD(rank=4)  yes     all-reduce 0.25          128         128
    <BLANKLINE>
    Counted in the first step, ...
    """
    for size in workers:
        if size < 2:
            raise ValueError(f"--workers {size}: one worker sends nothing; take 2 or more")
    rows = [["method", "memory", "bits an element", *(f"{size} workers" for size in workers)]]
    for method in methods:
        meters = [metered(method, size) for size in workers]
        fewer = [_ring(size) / meter.wire_bytes for meter, size in zip(meters, workers, strict=True)]
        memory = "own" if method.kind == "own" else "yes" if has_memory(method, None) else "no"
        rows.append([repr(method), memory, _handed(meters[0], workers[0]), *(f"{x:.3g}" for x in fewer)])
    return f"{aligned(rows, left=(0, 1, 2))}\n\n{NOTE.format(workers[0])}"


def metered(method: Method, size: int, shape: tuple[int, int] = SHAPE) -> Meter:
    """What one of `size` workers sends in a step.

    >>> metered(NoCompression(), 2).handed["all_reduce"]  # 4 MiB, and the flags by which workers agree that all is finite
    4194312
    """
    aggregator = Aggregator(method, _OneOf(size), smallest=0)
    aggregator({"w": torch.randn(shape, generator=torch.Generator().manual_seed(0)) * SIGMA})
    return aggregator.meter


def _handed(meter: Meter, size: int) -> str:
    """By collective, without the flags."""
    tiny = metered(NoCompression(), size, (2, 2))
    flags = tiny.handed["all_reduce"] - tiny.gradient_bytes
    own = meter.handed | {"all_reduce": meter.handed["all_reduce"] - flags}
    elements = SHAPE[0] * SHAPE[1]
    bits = {kind.replace("_", "-"): 8 * nbytes / elements for kind, nbytes in reversed(own.items()) if nbytes}
    return " + ".join(f"{kind} {each:.3g}" for kind, each in bits.items())


def _ring(size: int) -> float:
    """Bytes on the wire of the same gradient's all-reduce in fp32."""
    meter = Meter()
    meter.count("all_reduce", 4 * SHAPE[0] * SHAPE[1], size)
    return meter.wire_bytes


class _OneOf(Transport):
    """Worker 0 of `size` that all have the same gradients: the bytes of a real job, for the work of one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.ranks = size, (0,)

    def _sum(self, mine: list[Tensor]) -> Coming[list[Tensor]]:
        mine[0] *= self.size
        return lambda: mine

    def _gather(self, mine: list[Tensor]) -> Coming[list[list[Tensor]]]:
        return lambda: [mine * self.size]

    def _scatter(self, mine: list[list[Tensor]]) -> Coming[list[list[Tensor]]]:
        return lambda: [[mine[0][0]] * self.size]
