"""The advisor: which way to train pays for a task or a model of yours, on a network and so many workers."""

from .advice import Advice
from .advise import METHODS, advise, check
from .networks import nominal
from .subject import Subject, subject

__all__ = ["METHODS", "Advice", "Subject", "advise", "check", "nominal", "subject"]
