"""`Sigterm`: records SIGTERM, so that a checkpoint can be saved before the process ends."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any


class Sigterm:
    """Records SIGTERM in `seen` instead of ending the process. Works only in the main thread; elsewhere it does nothing."""

    def __init__(self) -> None:
        self.seen = False
        self._process = os.getpid()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child inherits the handler: end it as usual
            signal.signal(signal.SIGTERM, self._previous)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.seen = True
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        """Restore the previous handler, unless another one was installed since."""
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._record:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, self._previous)
