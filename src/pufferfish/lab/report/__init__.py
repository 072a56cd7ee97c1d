"""Comparison of runs: one HTML page, or the same tables in Markdown."""

from .report import FORMATS, report, write

__all__ = ["FORMATS", "report", "write"]
