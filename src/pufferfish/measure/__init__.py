"""Measurement: where a step's time goes, the link between workers, predicted speed-ups, and logs of runs."""

from .breakdown import Breakdown
from .cost_model import CostModel, Prediction, Work
from .diagnose import diagnose
from .diagnosis import Diagnosis
from .dry_run import Traffic, dry_run
from .link import AlphaBeta, Link
from .probe import probe
from .run_log import RunLog
from .saved_run import Run, read_run
from .speedup_estimate import SpeedupEstimate

__all__ = [
    "AlphaBeta", "Breakdown", "CostModel", "Diagnosis", "Link", "Prediction", "Run", "RunLog", "SpeedupEstimate",
    "Traffic", "Work", "diagnose", "dry_run", "probe", "read_run",
]  # fmt: skip
