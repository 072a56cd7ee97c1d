"""Benchmarks of training methods on a task: runs over several seeds, interleaved timing, a table and an HTML page."""

from .bench import bench, run_bench
from .bench_lines import BenchLines, restore_parts
from .bench_runs import Shard
from .bench_settings import BenchSettings

__all__ = ["BenchLines", "BenchSettings", "Shard", "bench", "restore_parts", "run_bench"]
