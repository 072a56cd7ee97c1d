"""Tests for what users add: `check_compressor` for a compression method of their own."""

from .compress.testing import check_compressor

__all__ = ["check_compressor"]
