"""`LostContact`: the error of a worker whose message the others did not answer; it names the operation."""

from typing import Any

import torch.distributed as dist


class LostContact(RuntimeError):
    """Raised where a collective failed: a worker has exited, is elsewhere, or cannot be reached."""


def lost_contact(operation: str, group: Any, seconds: float) -> LostContact:
    """Return the error of an operation in which a collective failed, to be raised from the backend's error.

    Args:
        operation: operation of this worker, such as "switch.step".
        group: the process group of the collective.
        seconds: for which this worker has waited.
    """
    return LostContact(
        f"{operation}: worker {dist.get_rank(group)} lost contact with the others after {seconds:.0f} s: a worker has "
        "exited, is elsewhere, such as in a training step, or cannot be reached. Look for the first error in the "
        "workers' logs; every worker must make the same calls in the same order"
    )


def workers_text(ranks: list[int]) -> str:
    """
    >>> workers_text([1]), workers_text([0, 2])
    ('worker 1', 'workers 0, 2')
    """
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
