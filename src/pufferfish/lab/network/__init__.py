"""Several hosts on one machine, joined by emulated links of a chosen speed: real TCP over network namespaces."""

from .hosts import Hosts
from .link_shape import LinkShape
from .loopback import Loopback, emulate
from .measured_link import MeasuredLink
from .network import Network, unavailable_reason
from .orphans import kill_orphans

__all__ = [
    "Hosts",
    "LinkShape",
    "Loopback",
    "MeasuredLink",
    "Network",
    "emulate",
    "kill_orphans",
    "unavailable_reason",
]
