"""Comparison of runs: one HTML page, or the same tables in Markdown."""

from .report import report, write

__all__ = ["report", "write"]
