"""`Sigterm`: records SIGTERM and ctrl-C, so that a checkpoint can be saved before the process ends."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

_CTRL_C = b"\nctrl-C: saving a checkpoint after this update; press it again to interrupt at once\n"


class Sigterm:
    """Records SIGTERM in `seen` from `catch` on, instead of ending the process; only in the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self._process = os.getpid()
        self._previous: Any = None
        self._caught = self._tell = False

    def catch(self) -> None:
        """Record SIGTERM until `close`. A handler that others have installed since the first call stays."""
        if not self._caught and threading.current_thread() is threading.main_thread():
            self._process, self._caught = os.getpid(), True
            self._previous = signal.signal(signal.SIGTERM, self._record)

    def catch_ctrl_c(self, tell: bool) -> None:
        """Record the first ctrl-C too; the second one raises KeyboardInterrupt. A handler that others installed stays.

        Args:
            tell: write a line to standard error.
        """
        self._tell = tell
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._record_ctrl_c)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child inherits the handler: end it as usual
            signal.signal(signal.SIGTERM, self._previous)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.seen = True
        if callable(self._previous):
            self._previous(number, frame)

    def _record_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader's worker: it is needed until its parent stops
            return
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._tell:
            with contextlib.suppress(OSError):
                os.write(2, _CTRL_C)  # print may be interrupted in the middle of a line

    def close(self) -> None:
        """Restore the previous handlers, unless others were installed since."""
        with contextlib.suppress(ValueError):  # not the main thread
            if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._record:
                signal.signal(signal.SIGTERM, self._previous)
            if signal.getsignal(signal.SIGINT) == self._record_ctrl_c:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self._caught = False
