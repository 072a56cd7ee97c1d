"""Methods compared fairly: a folder of runs and of timed rounds, a table and a page."""

from .bench import bench, run
from .bench_settings import Asked
from .cells import Shard

__all__ = ["Asked", "Shard", "bench", "run"]
