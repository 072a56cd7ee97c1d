"""`methods_parts`: what the names of methods mean, and what compression sends and saves, for `pufferfish methods`."""

from collections.abc import Sequence

import torch

from ...compression import Accordion, Engine, Meter, Method, NoCompression, PowerSGD, Settings
from ...compression.simulated import OneWorker
from ...planning.text import Table, track
from ..method_name import LOCAL_STEPS, MODELS, RECIPE_OPTIONS, method_words, training_method, written

SHAPE = (1024, 1024)
#: Standard deviation of the gradients: 1 % of the elements exceed the default τ = 0.001 of Threshold.
SIGMA = 1e-3 / 2.5758

NOTE = f"""\
Counted in one step, after a warm-up, for a {SHAPE[0]}×{SHAPE[1]} gradient of normal random
numbers with σ = {SIGMA:.2g}. "bits per element" is what one of {{}} workers passes to the
collectives. The columns on the right are compression ratios: bytes on the wire
of an fp32 ring all-reduce divided by those of the method (below 1: the method
sends more). The ratio of threshold depends on the gradients, that of low-rank
methods on the shape. accordion is in its phase of light compression (`low`)."""


def methods_parts(names: Sequence[str], workers: Sequence[int] = (2, 8, 64)) -> list[str | Table]:
    """What the names of methods mean, and a table of their compression; of all methods without names.

    Args:
        workers: world sizes for which compression ratios are shown.

    >>> for part in methods_parts(["powersgd(4)"], workers=[2, 64])[:2]:
    ...     print(part)
    powersgd(4)
      model     dense: the task's own model
      exchange  gradients, compressed by powersgd(rank=4)
    method            error feedback  bits per element   2 workers  64 workers
    powersgd(rank=4)  yes             all-reduce 0.25          128         128
    """
    for size in workers:
        if size < 2:
            raise ValueError(f"--workers {size}: one worker sends nothing; pass 2 or more")
    if not names:
        return [*_models(), compression_table(all_methods(), workers), NOTE.format(workers[0])]
    parsed = [training_method(name) for name in names]
    parts: list[str | Table] = ["\n  ".join([method.name, *method.meaning()]) for method in parsed]
    if methods := [method.compress for method in parsed if method.compress is not None]:
        parts += [compression_table(methods, workers), NOTE.format(workers[0])]
    return parts


def all_methods() -> list[Method]:
    """All compression methods of the package with their defaults."""
    example = Accordion(PowerSGD(4), PowerSGD(1), every=1000)  # has no defaults
    return [example if kind is Accordion else kind() for kind in method_words().values()]


def compression_table(methods: Sequence[Method], workers: Sequence[int]) -> Table:
    """A table with one row per compression method."""
    rows = [["method", "error feedback", "bits per element", *(f"{size} workers" for size in workers)]]
    for method in track(methods, "compressing a gradient"):
        meters = [step_traffic(method, size) for size in workers]
        ratios = [_ring_bytes(size) / meter.wire_bytes for meter, size in zip(meters, workers, strict=True)]
        feedback = "yes" if Settings(method).has_error_feedback(method) else "no"
        feedback = "own" if method.kind == "own" else feedback
        bits = _bits_per_element(meters[0], workers[0])
        rows.append([written(method), feedback, bits, *(f"{x:.3g}" for x in ratios)])
    return Table(rows, left=(0, 1, 2), spare=("bits per element",))


def _models() -> list[str | Table]:
    rows = [["model", "its options"]]
    rows += [[name, ", ".join(options) or "–"] for name, options in MODELS.items()]
    steps = [["local steps", "meaning"], *([name, text] for name, text in LOCAL_STEPS.items())]
    more = f"Every model also takes {', '.join(RECIPE_OPTIONS[:-1])} and {RECIPE_OPTIONS[-1]}, a factor of the recipe's."
    return [Table(rows, left=(0, 1)), more, Table(steps, left=(0, 1))]


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
