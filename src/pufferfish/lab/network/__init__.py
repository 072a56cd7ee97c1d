"""Several hosts on one machine, joined by emulated links of a chosen speed: real TCP over network namespaces."""

from .hosts import Hosts, MeasuredLink
from .network import LinkShape, Network, unavailable_reason

__all__ = ["Hosts", "LinkShape", "MeasuredLink", "Network", "unavailable_reason"]
