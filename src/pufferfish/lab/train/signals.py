"""Signals that stop a run: SIGINT (ctrl-C) and SIGTERM have the same effect."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


def sigterm_as_sigint() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on ctrl-C. No effect outside the main thread."""
    return _handler(signal.SIGTERM, signal.default_int_handler)


def sigint_as_sigterm() -> contextlib.AbstractContextManager[None]:
    """Turn the first ctrl-C into SIGTERM, on which a `Checkpoint` saves; the second one raises KeyboardInterrupt."""

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)

    return _handler(signal.SIGINT, terminate)


@contextlib.contextmanager
def _handler(number: int, handle: Callable[[int, Any], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, previous)
