"""PowerSGD without error feedback, to show what error feedback does: `no_feedback.py:PowerSGD(4)`."""

from dataclasses import dataclass

from pufferfish import compression


@dataclass(frozen=True)
class PowerSGD(compression.PowerSGD):
    """Sends the same factors; what they leave out is lost."""

    kind = "unbiased"  # such methods have no error feedback
