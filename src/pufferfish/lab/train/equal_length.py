"""`EqualLength`: the updates with which a run takes as long, or sends as many bytes, as the dense run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EqualLength:
    """The updates of a run at equal time or bytes, and the figures that they follow from.

    The recipe's epochs become `steps_per_epoch` updates long, whatever a pass over the data has. So the learning-rate
    schedule, the validations and the moment of the switch stay at the same fractions of the run.

    Args:
        equal: "time" or "bytes".
        steps_per_epoch: updates between two validations.
        relative: time, or bytes, of the method's run relative to the dense one with equally many updates.
        seconds: of an update: "dense"; "before" and "after" the last change of the method's model, and the "mean" of these in
            its run; if predicted, "dense computing" and "computing": the parts of "dense" and "after" without the exchange. Empty
            for equal bytes.
        link: that the times are predicted for; "": they are measured.
        note: about a limited number of updates.

    >>> EqualLength(equal="time", steps_per_epoch=30, relative=0.7).note
    ''
    """

    equal: str
    steps_per_epoch: int
    relative: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    link: str = ""
    note: str = ""
