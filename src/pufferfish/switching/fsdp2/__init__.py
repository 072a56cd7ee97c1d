"""The switch under FSDP2: a model whose shards cannot be changed in place is built again and filled."""

from .outline import outline, parameters
from .rebuild import rebuild, spectra

__all__ = ["outline", "parameters", "rebuild", "spectra"]
