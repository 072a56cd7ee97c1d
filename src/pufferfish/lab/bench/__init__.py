"""Benchmarks of training methods on a task: runs over several seeds, interleaved timing, a table and an HTML page."""

from .bench import bench, run_bench
from .bench_settings import BenchSettings

__all__ = ["BenchSettings", "bench", "run_bench"]
