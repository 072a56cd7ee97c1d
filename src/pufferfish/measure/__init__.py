"""What a training job costs here: where a step's time goes, what the link gives, what would pay, and a log of it."""

from .breakdown import Breakdown
from .choices import Choice
from .diagnose import diagnose
from .diagnosis import Diagnosis
from .dryrun import Sent, dry_run
from .link import Line, Link
from .model import CostModel, Prediction, Work, buckets
from .probe import probe
from .run import Run, read
from .runlog import RunLog

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
