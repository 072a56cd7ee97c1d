"""Measurement: where a step's time goes, the link between workers, predicted speed-ups, and logs of runs."""

from .breakdown import Breakdown
from .cost_model import CostModel, Prediction, Traffic, Work, dry_run
from .diagnose import Diagnosis, diagnose
from .link import AlphaBeta, Link, probe
from .options import SpeedupEstimate
from .run_log import Run, RunLog, read_run

__all__ = [
    "AlphaBeta", "Breakdown", "CostModel", "Diagnosis", "Link", "Prediction", "Run", "RunLog", "SpeedupEstimate",
    "Traffic", "Work", "diagnose", "dry_run", "probe", "read_run",
]  # fmt: skip
