"""Comparison of runs: one HTML page, or the same figures as CSV, LaTeX or Markdown."""

from .report import FORMATS, report, write

__all__ = ["FORMATS", "report", "write"]
