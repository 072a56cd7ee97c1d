"""Several hosts on one machine, joined by links as slow as you like: real TCP over an emulated network."""

from .clean import clean
from .hosts import Hosts
from .link_shape import Shape
from .link_speed import Link
from .loopback import Loopback, emulate
from .namespaces import Network, why_not

__all__ = ["Hosts", "Link", "Loopback", "Network", "Shape", "clean", "emulate", "why_not"]
