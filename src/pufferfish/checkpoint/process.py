"""What a checkpoint needs of the process: its random number generators, its signals, and its place in the data."""

import contextlib
import copy
import hashlib
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

_CTRL_C = b"\nctrl-C: saving a checkpoint after this update; press it again to interrupt at once\n"


class Sigterm:
    """Records SIGTERM in `seen` from `catch` on, instead of ending the process; only in the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}  # handlers of the signals that are caught
        self._tell = False

    def catch(self, number: int = signal.SIGTERM) -> None:
        """Record a signal until `close`. A handler that others have installed since the first call stays."""
        if number not in self._previous and threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._previous[number] = signal.signal(number, self._record)

    def catch_ctrl_c(self, tell: bool) -> None:
        """Record the first ctrl-C too; the second one raises KeyboardInterrupt. A handler that others installed stays.

        Args:
            tell: write a line to standard error.
        """
        self._tell = tell
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.catch(signal.SIGINT)

    def _record(self, number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != self._process  # a child inherits the handlers
        if number == signal.SIGINT:
            if not forked:  # a data loader's worker is needed until its parent stops
                self.seen = True
                signal.signal(number, signal.default_int_handler)
            if not forked and self._tell:
                with contextlib.suppress(OSError):
                    os.write(2, _CTRL_C)  # print may be interrupted in the middle of a line
        elif forked:  # ends as usual
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
        else:
            self.seen = True
            if callable(self._previous[number]):
                self._previous[number](number, frame)

    def close(self) -> None:
        """Restore the previous handlers, unless others were installed since."""
        with contextlib.suppress(ValueError):  # not the main thread
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._record:
                    signal.signal(number, previous)
            self._previous.clear()


def rng_state(devices: Sequence[torch.device | str] = ()) -> dict[str, Any]:
    """Return the state of the global generators as numbers, text and tensors.

    Args:
        devices: GPUs whose generators are meant, which need not be the current device; none: the current one.

    >>> before = rng_state()
    >>> draw = torch.rand(1), random.random(), np.random.rand()
    >>> set_rng_state(before)
    >>> draw == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": numpy_state["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices or ["cuda"]]
    return state


def set_rng_state(state: dict[str, Any], devices: Sequence[torch.device | str] = ()) -> None:
    """Restore the generators. CUDA's are left unchanged if they were not saved or no GPU is available."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, value in zip(devices or ["cuda"], state["cuda"], strict=False):
            torch.cuda.set_rng_state(value, device)


def seed_rng(text: str) -> None:
    """Seed all generators with a hash of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)


def skip_batches(loader: DataLoader[Any], n: int) -> Iterator[Any]:
    """Iterate over an epoch of `loader` without its first `n` batches, for a run resumed in mid-epoch.

    Only indices are skipped, so no data is loaded for them; an `IterableDataset` has to be read up to that
    point. The global random number generators keep the state that `resume` restored.

    The order of the data must not depend on those generators: use `DistributedSampler` with `set_epoch`, a
    sampler with a `generator` seeded by the epoch, or no shuffling. With `shuffle=True` and no generator a run
    resumes exactly only at the start of an epoch. Loader worker processes get new seeds, so random numbers
    drawn there are not reproduced.

    >>> loader = DataLoader(list(range(10)), batch_size=4)
    >>> [batch.tolist() for batch in skip_batches(loader, 1)]
    [[4, 5, 6, 7], [8, 9]]
    """
    if n == 0:
        yield from loader
        return
    stream = isinstance(loader.dataset, IterableDataset)
    if not stream and n > len(loader):
        raise ValueError(
            f"skip_batches: n={n}, but an epoch has {len(loader)} batches; count from the start of the epoch, "
            "not of the run"
        )
    before = rng_state()  # the start of an epoch draws a number, which the interrupted run already drew
    if stream:
        batches = iter(loader)
        for _ in islice(batches, n):
            pass
    else:
        rest = copy.copy(loader)
        # A DataLoader refuses to have its samplers set as attributes.
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(rest).update({attribute: islice(getattr(loader, attribute), n, None), "_iterator": None})
        batches = iter(rest)
    set_rng_state(before)
    yield from batches
