"""The switch under FSDP2, whose shards cannot be changed in place: the model is built again in low rank."""

from .rebuild import rebuild
from .sharded_job import ShardedJob

__all__ = ["ShardedJob", "rebuild"]
