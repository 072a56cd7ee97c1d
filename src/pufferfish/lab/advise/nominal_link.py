"""`nominal_link`: a link from its specification, without a measurement."""

from dataclasses import replace

from ...measure import AlphaBeta, Link
from ..network import LinkShape

#: Seconds of software overhead per message: gloo on CPUs, NCCL on GPUs.
OVERHEAD = {"cpu": 1e-4, "cuda": 3e-5}
#: Assumed bits per second between the workers of one machine.
INTRA_NODE_BANDWIDTH = 1e11


def nominal_link(shape: LinkShape, nodes: int, per_node: int, device: str = "cpu") -> Link:
    """The link of `nodes` machines, whose `per_node` workers share one network connection of this shape.

    In a ring, one worker of a machine sends to the next machine; in an all-to-all, all of them send at the same time.

    >>> link = nominal_link(LinkShape.parse("10gbit"), nodes=4, per_node=8)
    >>> link.size, round(link.bandwidth / 1e9, 2), link.extrapolated
    (32, 9.49, True)
    """
    size, overhead = nodes * per_node, OVERHEAD.get(device.partition(":")[0], 3e-5)
    if nodes == 1:
        link = Link.nominal(bandwidth=INTRA_NODE_BANDWIDTH, latency=overhead, size=size)
        return replace(link, per_node=size)
    delay = shape.delay_ms / 1e3
    link = Link.nominal(bandwidth=1e6 * shape.mbit, latency=delay + overhead, size=size)
    ring = link.collectives["all_reduce"]
    outside = (size - per_node) / (size - 1)  # fraction of a worker's peers on other machines
    all_to_all = replace(ring, beta=ring.beta * max(1.0, per_node * outside))
    link = replace(link, collectives={"all_reduce": ring, "all_gather": ring, "all_to_all": all_to_all})
    if per_node == 1:
        return link
    intra_node = {"all_reduce": AlphaBeta(alpha=overhead, beta=8 / INTRA_NODE_BANDWIDTH)}
    return replace(link, per_node=per_node, intra_node=intra_node, inter_node={"all_reduce": ring})
