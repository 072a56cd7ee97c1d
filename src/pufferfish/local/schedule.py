"""`Schedule`: when local steps average which fragment of the model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The moments of averages, counted in updates. Invalid values raise ValueError.

    >>> schedule = Schedule(h=6, fragments=3)
    >>> [schedule.due(update) for update in range(1, 7)]
    [[], [1], [], [2], [], [0]]
    """

    h: int  #: updates between two averages of a fragment
    fragments: int = 1  #: their number
    delay: int = 0  #: updates from sending a fragment to applying its average
    mixing: float = 0.0  #: share of its own parameters that a worker keeps

    def __post_init__(self) -> None:
        h, fragments, delay, mixing = self.h, self.fragments, self.delay, self.mixing
        for name, value, what in (("h", h, "updates"), ("fragments", fragments, "fragments")):
            if value < 1:
                raise ValueError(f"LocalSteps: {name}={value!r} is not a number of {what}")
        if fragments > h:
            raise ValueError(
                f"LocalSteps: fragments={fragments} exceeds h={h}; average at most one fragment in an update"
            )
        if not 0 <= delay < h:
            raise ValueError(
                f"LocalSteps: delay={delay} must be at least 0 and below h={h}, after which the fragment is sent again"
            )
        if not 0 <= mixing < 1 or (mixing and not delay):
            raise ValueError(
                f"LocalSteps: mixing={mixing!r} must be at least 0 and below 1, and 0 without a delay"
            )

    def due(self, update: int) -> list[int]:
        """Return the fragments that are averaged after this update, counted from 1."""
        return [p for p in range(self.fragments) if update % self.h == self.h * p // self.fragments]
