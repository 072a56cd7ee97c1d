"""`Console`: messages, a progress line and results of a run on the terminal.

Workers that a command has started mark their messages. An `OutputRelay` in the command shows those and keeps the rest of
their output for the case of a failure.
"""

import os
import shutil
import sys
import time

#: Environment variable that `launch_workers` sets for workers whose output it relays.
RELAYED = "PUFFERFISH_RELAYED"
#: Precedes a marked message in a worker's output.
MARK = "\x1e"


class Console:
    """Writes messages to standard error and results to standard output.

    Args:
        silent: write nothing.

    >>> Console(silent=True).info("not shown")
    >>> Console().result("dense: accuracy 97.50 %")
    dense: accuracy 97.50 %
    """

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._relayed = RELAYED in os.environ
        self._width = 0  # characters in the progress line
        self._last_progress = 0.0
        self._written: set[str] = set()  # keys of lines that are written once

    def info(self, text: str) -> None:
        """Write a line."""
        self.show("info", text)

    def once(self, key: str, text: str) -> None:
        """Write a line, unless one with the same key was written before."""
        if key not in self._written:
            self._written.add(key)
            self.info(text)

    def progress_due(self) -> bool:
        """Whether a progress line would be seen and the last one is old enough to be replaced."""
        visible = not self.silent and (self._relayed or sys.stderr.isatty())
        return visible and time.monotonic() > self._last_progress + 0.5

    def progress(self, text: str) -> None:
        """Replace the progress line, on a terminal only."""
        self.show("progress", text)

    def result(self, text: str) -> None:
        """Write a result to standard output."""
        self.show("result", text)

    def error(self, text: str) -> None:
        """Write why the command cannot run."""
        self.show("error", text)

    def connection_lost(self, text: str) -> None:
        """Write that other workers cannot be reached."""
        self.show("connection_lost", text)

    def show(self, kind: str, text: str) -> None:
        """Write a message of one of the kinds above."""
        if self.silent:
            return
        if kind == "progress":
            self._last_progress = time.monotonic()
        if self._relayed:
            sys.stderr.write(f"{MARK}{kind} {text}\n")  # in one call: several workers share the stream
            sys.stderr.flush()
        elif kind != "progress":
            self._overwrite("")
            print(text, file=sys.stdout if kind == "result" else sys.stderr, flush=True)
        elif sys.stderr.isatty():
            self._overwrite(text)

    def _overwrite(self, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be overwritten
        if self._width or text:
            print(f"\r{'':<{self._width}}\r{text}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
