"""What a training job costs here: where a step's time goes, what the link gives, what would pay, and a log of it."""

from .breakdown import Breakdown
from .cost_model import CostModel, Prediction, Work, buckets
from .diagnose import diagnose
from .diagnosis import Diagnosis
from .dry_run import Sent, dry_run
from .link import Line, Link
from .probe import probe
from .ranking import Choice
from .run_log import RunLog
from .saved_run import Run, read

__all__ = [
    "Breakdown",
    "Choice",
    "CostModel",
    "Diagnosis",
    "Line",
    "Link",
    "Prediction",
    "Run",
    "RunLog",
    "Sent",
    "Work",
    "buckets",
    "diagnose",
    "dry_run",
    "probe",
    "read",
]
