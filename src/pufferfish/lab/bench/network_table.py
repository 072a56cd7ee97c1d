"""`network_table`: the runs of a bench on one device, as they would be on several hosts, by the cost model."""

from collections.abc import Sequence

from ..report.comparison import DENSE, Comparison
from ..report.formatting import format_bytes, format_seconds
from ..report.link_times import BF16_BYTES, HOSTS, LINKS, run_seconds, step_seconds, trained_parameters
from ..report.tables import Cell, Table


def network_table(comparison: Comparison, links: Sequence[str] = LINKS) -> Table | None:
    """Gradient bytes, and the predicted times of a step and of a run on hosts that each compute what the device did.

    None for runs of several workers, and without a dense run, whose updates low-rank runs begin with.
    """
    several = any(run.workers > 1 for run in comparison.runs)
    if several or DENSE not in {method.name for method in comparison.methods}:
        return None
    steps = {link: {m.name: step_seconds(m, HOSTS, link) for m in comparison.methods} for link in links}
    if steps[links[0]][DENSE] is None:
        return None
    rows = []
    for method in comparison.methods:
        row, size = [Cell(method.name)], trained_parameters(method)
        row.append(Cell() if size is None else Cell(format_bytes(BF16_BYTES * size), BF16_BYTES * size))
        for link in links:
            times = steps[link][method.name], run_seconds(method, steps[link])
            row += [Cell() if x is None else Cell(format_seconds(x), x) for x in times]
        rows.append(row)
    heads = [f"{what}, {link}" for link in links for what in ("step", "run")]
    notes = [
        f"Predicted for {HOSTS} hosts, each with such a link and one device that is as fast as the one here. DDP sends gradients in "
        "bf16 by a ring all-reduce, during the backward pass, which is assumed to take two thirds of the step. Updates before the "
        "switch are dense."
    ]
    return Table(f"{HOSTS} hosts, by the cost model", ["method", "gradients, bf16", *heads], rows, notes)
