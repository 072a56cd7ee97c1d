"""Methods compared fairly: a folder of runs and of timed rounds, a table and a page."""

from .asked import Asked
from .cells import Shard
from .drive import bench, run

__all__ = ["Asked", "Shard", "bench", "run"]
