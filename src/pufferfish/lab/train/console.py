"""What a run writes on the terminal: `Console`, and `OutputRelay`, which shows the messages of workers that a command has started.

Workers mark their messages; the relay keeps the rest of their output for the case of a failure."""

import os
import re
import shutil
import sys
import time
from collections import deque

#: Environment variable that `launch_workers` sets for workers whose output it relays.
RELAYED = "PUFFERFISH_RELAYED"
#: Precedes a marked message in a worker's output.
MARK = "\x1e"


class Console:
    """Writes messages to standard error and results to standard output.

    Args:
        silent: write nothing.
        brief: lines replace one another, after this text, instead of staying.

    >>> Console(silent=True).info("not shown")
    >>> Console().result("dense: accuracy 97.50 %")
    dense: accuracy 97.50 %
    """

    def __init__(self, silent: bool = False, brief: str = "") -> None:
        self.silent, self.brief = silent, brief
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
        if self.brief and kind in ("info", "progress"):
            kind, text = "progress", self.brief + text
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


_RANK = "[rank"  # torch's prefix of the lines of a worker's traceback


class OutputRelay:
    """Shows workers' marked messages; call it with each line of output, as `Hosts.launch` does.

    >>> relay = OutputRelay(Console())
    >>> relay(f"host0 | {MARK}result dense: accuracy 97.50 %")
    dense: accuracy 97.50 %
    >>> relay("host0 | Traceback (most recent call last):")
    >>> relay.failure_output
    'Traceback (most recent call last):'
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.errors: list[str] = []  # reasons why the command cannot run
        self._killed = ""  # message about the first worker that a signal ended
        self._aborted = False  # by a signal of its own, so its output may say why
        self._connection_lost = ""  # message of the first worker that lost the others
        self._traceback: list[str] = []  # the first one
        self._last_lines: deque[str] = deque(maxlen=15)

    @property
    def failure_output(self) -> str:
        """First traceback, or the last lines of output; empty where `failure_reason` is enough."""
        return "\n".join(
            self._traceback or ([] if self.failure_reason and not self._aborted else self._last_lines)
        )

    @property
    def failure_reason(self) -> str:
        """One line about the cause of the failure; empty if unknown."""
        return "; ".join(filter(None, (self._killed, self._connection_lost)))

    def __call__(self, line: str) -> None:
        """Process one line of a host's output."""
        _, _, text = line.partition(" | ")
        _, mark, message = text.partition(MARK)
        if not mark:
            self._last_lines.append(text)
            if signal := re.search(r"failed \(exitcode: -(\d+)\)", text):  # written by torchrun's agent
                self._killed = self._killed or f"a worker was ended by signal {signal[1]}"
                self._aborted |= signal[1] not in ("9", "15")
            # Once the reason is known, a traceback without a rank is the agent's, which only repeats it.
            begins = "Traceback" in text and (_RANK in text or not self.failure_reason)
            continues = bool(self._traceback) and (_RANK in text or _RANK not in self._traceback[0])
            if (continues or begins) and len(self._traceback) < 60:
                self._traceback.append(text)
            return
        kind, _, words = message.partition(" ")
        if kind == "connection_lost":
            self._connection_lost = self._connection_lost or words
            return
        if kind == "error":
            if words in self.errors:
                return
            self.errors.append(words)
        self.console.show(kind, words)
