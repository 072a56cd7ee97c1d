"""Cooperation of the workers of a job: agreement, shared SVDs, DDP re-wrapping, exact averages, the finite guard."""

from .exact import exact_
from .finite_guard import FiniteGuard

__all__ = ["FiniteGuard", "exact_"]
