"""`nominal`: a link that nobody measured, from what it is called."""

from __future__ import annotations

from dataclasses import replace

from ...measure import Line, Link
from ..network import Shape

#: Seconds that software adds to a message: gloo's on a CPU, NCCL's on GPUs.
SOFTWARE = {"cpu": 1e-4, "cuda": 3e-5}
#: Bits a second between workers of one machine, where nobody measured them.
INSIDE = 1e11


def nominal(shape: Shape, nodes: int, per_node: int, device: str = "cpu") -> Link:
    """The link of `nodes` machines, each behind one line of this shape that its `per_node` workers share.

    In a ring one of a machine's workers sends to the next machine; in an all-to-all all of them do, at the same time.

    >>> link = nominal(Shape.parse("10gbit"), nodes=4, per_node=8)
    >>> link.size, round(link.bandwidth / 1e9, 2), link.extrapolated
    (32, 9.49, True)
    """
    size, software = nodes * per_node, SOFTWARE.get(device.partition(":")[0], 3e-5)
    if nodes == 1:
        inside = Link.of(bandwidth=INSIDE, latency=software, size=size)
        return replace(inside, per_node=size)
    delay = shape.delay_ms / 1e3
    link = Link.of(bandwidth=1e6 * shape.mbit, latency=delay + software, size=size)
    line = link.lines["all_reduce"]
    outside = (size - per_node) / (size - 1)  # of all that a worker sends to
    lines = {
        "all_reduce": line,
        "all_gather": line,
        "all_to_all": replace(line, beta=line.beta * max(1.0, per_node * outside)),
    }
    if per_node == 1:
        return replace(link, lines=lines)
    within = Line(alpha=software, beta=8 / INSIDE)
    between = replace(line, beta=per_node * line.beta)  # all of a machine send at once
    return replace(
        link, lines=lines, per_node=per_node, inside={"all_reduce": within}, between={"all_reduce": between}
    )
