"""The advisor: predicts and measures which training method is fastest for a model, a network and a number of workers."""

from .advice import Advice
from .advisor import METHODS, Workload, advise, check, load_workload
from .run_advise import nominal_link

__all__ = ["METHODS", "Advice", "Workload", "advise", "check", "load_workload", "nominal_link"]
