"""`LostContact`: the error of a worker whose message the others did not answer; it says what they were doing."""

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: Seconds in which the other workers can tell what they were doing.
_GRACE = 5.0


class LostContact(RuntimeError):
    """Raised where a collective failed: a worker has exited, is elsewhere, or cannot be reached."""


def lost_contact(operation: str, group: Any, seconds: float) -> LostContact:
    """Return the error of an operation in which a collective failed, to be raised from the backend's error.

    The group cannot be used any more, so each worker that fails leaves the name of its operation in the job's store
    and reads those of the others. A worker that is not there has exited, or is in code that cannot tell.

    Args:
        operation: operation of this worker, such as "switch.step".
        group: the process group of the collective.
        seconds: for which this worker has waited.
    """
    rank, notes = dist.get_rank(group), _exchange_notes(operation, dist.get_process_group_ranks(group))
    silent = [r for r, note in enumerate(notes) if note is None]
    elsewhere: dict[str, list[int]] = {}
    for r, note in enumerate(notes):
        if note not in (None, operation):
            elsewhere.setdefault(str(note), []).append(r)
    parts = []
    if silent:
        parts.append(
            f"{workers_text(silent)} did not reach this call within {seconds:.0f} s: exited, or elsewhere, such as in a "
            "training step"
        )
    parts += [f"{workers_text(ranks)} failed in {note}" for note, ranks in elsewhere.items()]
    found = "; ".join(parts) or "all workers reached this call, so the connection itself failed"
    return LostContact(
        f"{operation}: worker {rank} lost contact with the others. {found[0].upper()}{found[1:]}. Look for the first "
        "error in the workers' logs; every worker must make the same calls in the same order"
    )


def workers_text(ranks: list[int]) -> str:
    """
    >>> workers_text([1]), workers_text([0, 2])
    ('worker 1', 'workers 0, 2')
    """
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _exchange_notes(operation: str, ranks: list[int]) -> list[str | None]:
    """Operations of all workers, as far as they can tell. `ranks` are their numbers in the whole job."""
    own, notes = ranks.index(dist.get_rank()), dict.fromkeys(range(len(ranks)))
    store = dist.distributed_c10d._get_default_store()
    keys = [f"pufferfish/lost contact/{rank}" for rank in ranks]

    def exchange() -> None:
        with suppress(RuntimeError):  # the process that holds the store may be the one that has exited
            store.set(keys[own], operation)
            with suppress(RuntimeError):
                store.wait(keys, timedelta(seconds=_GRACE))
            notes.update({i: store.get(key).decode() for i, key in enumerate(keys) if store.check([key])})

    # In a thread that is left behind: behind a broken link, a request to the store has no time limit.
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(2 * _GRACE)
    return [notes[i] if i != own else operation for i in range(len(ranks))]
