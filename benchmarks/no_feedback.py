"""PowerSGD without error feedback, to show what error feedback does: `no_feedback.py:PowerSGD(4)`."""

from pufferfish import compression


class PowerSGD(compression.PowerSGD):
    """Sends the same factors; what they leave out is lost."""

    kind = "unbiased"  # such methods have no error feedback
