"""`track` and `progress`: report how far a long loop is. They show nothing unless a program calls `display_progress`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
#: Makes a display from a text and the total amount, if known; the display gives a function to add to the amount done.
Display = Callable[[str, float | None], AbstractContextManager[Callable[[float], None]]]
_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def display_progress(display: Display) -> Iterator[None]:
    """Show the progress of loops by `display`, inside the context."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def progress(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Context of a long loop; gives a function to call with the amount that was done, out of `total`."""
    display = _display.get()
    if display is None:
        yield lambda amount: None
        return
    with display(text, total) as advance:
        yield advance


def track(items: Collection[T], text: str) -> Iterator[T]:
    """Iterate over `items` and report each as done when the next one is asked for.

    >>> @contextmanager
    ... def display(text, total):
    ...     yield lambda amount: print(f"{text}: {amount} of {total} done")
    >>> with display_progress(display):
    ...     for layer in track(["up", "down"], "layers"):
    ...         print(layer)
    up
    layers: 1 of 2 done
    down
    layers: 1 of 2 done
    """
    with progress(text, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
