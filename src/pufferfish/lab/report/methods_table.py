"""`methods_parts`: what each compression method sends and saves, for `pufferfish methods`."""

from collections.abc import Sequence

import torch

from ...compression import Accordion, Engine, Meter, Method, NoCompression, PowerSGD, Settings
from ...compression.parse_method import method_classes, parse_method
from ...compression.simulated import OneWorker
from ...planning.text import Table, track

SHAPE = (1024, 1024)
#: Standard deviation of the gradients: 1 % of the elements exceed the default τ = 0.001 of Threshold.
SIGMA = 1e-3 / 2.5758

NOTE = f"""\
Counted in one step, after a warm-up, for a {SHAPE[0]}×{SHAPE[1]} gradient of normal random
numbers with σ = {SIGMA:.2g}. "bits per element" is what one of {{}} workers passes to the
collectives. The columns on the right are compression ratios: bytes on the wire
of an fp32 ring all-reduce divided by those of the method (below 1: the method
sends more). The ratio of Threshold depends on the gradients, that of low-rank
methods on the shape. Accordion is in its phase of light compression (`low`)."""


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """The named methods; for an empty list, all methods of the package with their defaults.

    >>> parse_methods(["PowerSGD(2)", "BFloat16"])
    [PowerSGD(rank=2, start=0), BFloat16()]
    """
    example = Accordion(PowerSGD(4), PowerSGD(1), every=1000)  # has no defaults
    everything = [example if kind is Accordion else kind() for kind in method_classes().values()]
    return [parse_method(text) for text in texts] or everything


def methods_parts(methods: Sequence[Method], workers: Sequence[int] = (2, 8, 64)) -> list[str | Table]:
    """A table with one row per method, and the note below it.

    Args:
        workers: world sizes for which compression ratios are shown.

    >>> print(methods_parts([PowerSGD(rank=4)], workers=[2, 64])[0])
    method                     error feedback  bits per element   2 workers  64 workers
    PowerSGD(rank=4, start=0)  yes             all-reduce 0.25          128         128
    """
    for size in workers:
        if size < 2:
            raise ValueError(f"--workers {size}: one worker sends nothing; pass 2 or more")
    rows = [["method", "error feedback", "bits per element", *(f"{size} workers" for size in workers)]]
    for method in track(methods, "compressing a gradient"):
        meters = [step_traffic(method, size) for size in workers]
        ratios = [_ring_bytes(size) / meter.wire_bytes for meter, size in zip(meters, workers, strict=True)]
        feedback = "yes" if Settings(method).has_error_feedback(method) else "no"
        feedback = "own" if method.kind == "own" else feedback
        bits = _bits_per_element(meters[0], workers[0])
        rows.append([repr(method), feedback, bits, *(f"{x:.3g}" for x in ratios)])
    table = Table(rows, left=(0, 1, 2), spare=("bits per element",))
    return [table, NOTE.format(workers[0])]


def step_traffic(method: Method, size: int, shape: tuple[int, int] = SHAPE) -> Meter:
    """Traffic of one of `size` workers in a step after the warm-up.

    >>> step_traffic(NoCompression(), 2).collective_bytes["all_reduce"]  # 4 MiB, and the flags of the check for finite values
    4194312
    """
    engine = Engine(Settings(method, smallest=0), OneWorker(size))
    engine.state.steps = 2**20  # after `start=` or a warm-up
    engine.average({"w": torch.randn(shape, generator=torch.Generator().manual_seed(0)) * SIGMA})
    return engine.meter


def _bits_per_element(meter: Meter, size: int) -> str:
    """Bits per element by collective, without the flags."""
    tiny = step_traffic(NoCompression(), size, (2, 2))
    flags = tiny.collective_bytes["all_reduce"] - tiny.gradient_bytes
    own = meter.collective_bytes | {"all_reduce": meter.collective_bytes["all_reduce"] - flags}
    elements = SHAPE[0] * SHAPE[1]
    bits = {kind.replace("_", "-"): 8 * nbytes / elements for kind, nbytes in reversed(own.items()) if nbytes}
    return " + ".join(f"{kind} {each:.3g}" for kind, each in bits.items())


def _ring_bytes(size: int) -> float:
    """Bytes on the wire of an fp32 ring all-reduce of the same gradient."""
    meter = Meter()
    meter.sent("all_reduce", 4 * SHAPE[0] * SHAPE[1], size)
    return meter.wire_bytes
