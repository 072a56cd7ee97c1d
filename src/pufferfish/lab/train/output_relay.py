"""`OutputRelay`: shows the messages of launched workers and finds out why they failed."""

import re
from collections import deque

from .console import MARK, Console

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
