"""What a run says while it goes on: a line that is written over on a terminal, lines that stay, and the result.

Workers that a command has started mark what they say. The command shows that, and keeps the rest of their output, which is
of interest only when something breaks.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import deque

#: Set for workers whose output somebody relays.
RELAYED = "PUFFERFISH_RELAYED"
_MARK = "\x1e"
_RANK = "[rank"  # torch writes it before the lines of a worker's traceback


class Screen:
    """Standard error, and standard output for results; or nothing.

    >>> Screen(silent=True).say("nobody hears it")
    >>> Screen().result("dense: accuracy 97.50")
    dense: accuracy 97.50
    """

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._relayed = RELAYED in os.environ
        self._width = 0  # of what stands in the line
        self._shown = 0.0  # when

    def say(self, text: str) -> None:
        """A line that stays."""
        self._show("say", text)

    def due(self) -> bool:
        """Whether somebody looks at the line that is written over, and has seen the last one for a while."""
        looked_at = not self.silent and (self._relayed or sys.stderr.isatty())
        return looked_at and time.monotonic() > self._shown + 0.5

    def progress(self, text: str) -> None:
        """A line that the next one takes the place of; on a terminal only."""
        self._show("progress", text)

    def result(self, text: str) -> None:
        """What the command is run for."""
        self._show("result", text)

    def refuse(self, text: str) -> None:
        """Why it did not run."""
        self._show("refuse", text)

    def lost(self, text: str) -> None:
        """That other workers are out of reach."""
        self._show("lost", text)

    def _show(self, kind: str, text: str) -> None:
        if self.silent:
            return
        if kind == "progress":
            self._shown = time.monotonic()
        if self._relayed:
            sys.stderr.write(f"{_MARK}{kind} {text}\n")  # at once: several write here
            sys.stderr.flush()
        elif kind != "progress":
            self._over("")
            print(text, file=sys.stdout if kind == "result" else sys.stderr, flush=True)
        elif sys.stderr.isatty():
            self._over(text)

    def _over(self, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]  # a second line could not be written over
        if self._width or text:
            print(f"\r{'':<{self._width}}\r{text}", end="", file=sys.stderr, flush=True)
            self._width = len(text)


class Relay:
    """Shows what workers say, given their output line by line as `Hosts.launch` does.

    >>> relay = Relay(Screen())
    >>> relay(f"host0 | {_MARK}result dense: accuracy 97.50")
    dense: accuracy 97.50
    >>> relay("host0 | Traceback (most recent call last):")
    >>> relay.trouble
    'Traceback (most recent call last):'
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.refused: list[str] = []
        self._killed = ""  # that a worker was, and by which signal
        self._aborted = False  # by itself: then it may have said why
        self._lost = ""  # what the first worker said that could not reach the others
        self._first: list[str] = []  # of what is not for the user: from the first traceback on
        self._last: deque[str] = deque(maxlen=15)

    @property
    def trouble(self) -> str:
        """What broke first, as far as anybody can tell; others break because of it. Empty where `why` says it all."""
        return "\n".join(self._first or ([] if self.why and not self._aborted else self._last))

    @property
    def why(self) -> str:
        """What ended the job, where a line says it."""
        return "; ".join(filter(None, (self._killed, self._lost)))

    def __call__(self, line: str) -> None:
        """One line of a host's output."""
        _, _, text = line.partition(" | ")
        _, marked, said = text.partition(_MARK)
        if not marked:
            self._last.append(text)
            if ended := re.search(r"failed \(exitcode: -(\d+)\)", text):  # its agent's words
                self._killed = self._killed or f"a worker was ended by signal {ended[1]}"
                self._aborted |= ended[1] not in ("9", "15")
            # After that a traceback without a rank is an agent's, who tells the same at length.
            begins = "Traceback" in text and (_RANK in text or not self.why)
            goes_on = bool(self._first) and (_RANK in text or _RANK not in self._first[0])
            if (goes_on or begins) and len(self._first) < 60:
                self._first.append(text)
            return
        kind, _, words = said.partition(" ")
        if kind == "lost":
            self._lost = self._lost or words
            return
        if kind == "refuse":
            if words in self.refused:
                return
            self.refused.append(words)
        self.screen._show(kind, words)
