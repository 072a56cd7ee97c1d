"""The switch under FSDP2, whose shards cannot be changed in place: the model is built again in low rank."""

from .rebuild import rebuild, rebuilt
from .sharded_job import ShardedJob

__all__ = ["ShardedJob", "rebuild", "rebuilt"]
