"""The demo: what slow links cost and what low rank and compression bring, on this machine in a few minutes."""

from __future__ import annotations

from pathlib import Path

from . import Asked, run

LINK = "200mbit"
METHODS = ("powersgd-4", "pufferfish", "pufferfish+powersgd-4")


def asked() -> Asked:
    """Digits on four workers behind slow links: a bench with fixed settings, nothing else.

    >>> asked().methods
    ('dense', 'bf16', 'powersgd-4', 'pufferfish', 'pufferfish+powersgd-4')
    """
    return Asked(task="digits", methods=METHODS, epochs=8, hosts=4, network=LINK)


def demo(out: Path) -> int:
    """Run it and show it; the exit code."""
    what = asked()
    print(
        f"Four workers on this machine learn handwritten digits, each behind a link of {LINK}: dense DDP against bf16\n"
        f"gradients, PowerSGD, Pufferfish, and both. Five short runs, then their steps are timed in turns.\n"
        f"All of it goes to {out}; the same command goes on where it was stopped.\n",
        flush=True,
    )
    return run(what, out)
