"""Several hosts on one machine, joined by links as slow as you like: real TCP over an emulated network."""

from .clean import clean
from .hosts import Hosts
from .loopback import Loopback, emulate
from .namespaces import Network, why_not
from .probe import Link
from .shape import Shape

__all__ = ["Hosts", "Link", "Loopback", "Network", "Shape", "clean", "emulate", "why_not"]
