"""`demo`: a small bench on an emulated slow network, in a few minutes on one machine."""

from pathlib import Path

from . import BenchSettings, run_bench

LINK = "200mbit"
METHODS = ("powersgd(4)", "pufferfish", "pufferfish+powersgd(4)")


def demo_settings() -> BenchSettings:
    """The settings of the demo: digits on four workers behind slow links.

    >>> demo_settings().methods
    ('dense', 'bf16', 'powersgd(4)', 'pufferfish', 'pufferfish+powersgd(4)')
    """
    return BenchSettings(task="digits", methods=METHODS, epochs=8, nodes=4, network=LINK)


def demo(out: Path) -> int:
    """Run the demo and return its exit code."""
    print(
        f"Training handwritten digits on four workers of this machine, each behind a {LINK} link: dense DDP, bf16 gradients,\n"
        f"PowerSGD, Pufferfish, and Pufferfish with PowerSGD. Five short runs, then the steps of all methods are timed.\n"
        f"Results are written to {out}; rerun the same command to resume an interrupted demo.\n",
        flush=True,
    )
    return run_bench(demo_settings(), out)
