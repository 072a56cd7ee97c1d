"""`select_layers`: keeps a layer low-rank only if that makes the step shorter on a given link."""

from dataclasses import replace

from ..planning.entries import Entry
from ..planning.plan import Plan
from .cost_model import CostModel, Work

#: Lower bound of the remaining compute time, as a fraction; the savings of single layers may add up to more than the step.
_MIN_COMPUTE = 0.05


def select_layers(plan: Plan, work: Work, costs: CostModel, size: int, share: float = 1.0) -> Plan:
    """Return the plan with those layers left dense that low rank slows down by more than their smaller gradients save.

    Layers that are faster low-rank are always selected. The others are added one by one while the predicted step gets
    shorter, starting with those that save the most bytes for the time they lose.

    Args:
        plan: ranks, with times where layers were timed.
        work: a dense step with its messages.
        share: fraction of the gradient bytes that is sent, if a method compresses them.

    >>> import torch, pufferfish as pf
    >>> from pufferfish.measure import Link
    >>> plan = pf.plan(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    >>> slower = plan.replace(replace(e, ms=(1.0, 1.5)) for e in plan)
    >>> work = Work(forward=0.001, backward=0.002, messages=(("all_reduce", 263_168),))
    >>> for bandwidth in (1e8, 1e10):
    ...     costs = CostModel(link=Link.nominal(bandwidth=bandwidth, latency=0, size=2))
    ...     print(len(select_layers(slower, work, costs, 2).ranks))
    1
    0
    """
    layers: dict[str, list[Entry]] = {}
    for e in plan:
        if e.rank is not None:
            layers.setdefault(e.layer, []).append(e)
    ms = {name: entries[0].ms or (0.0, 0.0) for name, entries in layers.items()}  # entries share one timing
    saved_seconds = {name: (dense - low_rank) / 1e3 for name, (dense, low_rank) in ms.items()}
    saved_bytes = {
        name: sum((e.before - e.after) * e.itemsize for e in entries if e.trainable)
        for name, entries in layers.items()
    }
    compute, total = work.forward + work.backward, plan.before.gradient_bytes

    def step(selected: set[str]) -> float:
        saved = sum(saved_seconds[name] for name in selected)
        factor = max(_MIN_COMPUTE, 1 - saved / compute) if compute else 1.0
        left = share * (1 - sum(saved_bytes[name] for name in selected) / total) if total else share
        changed = replace(
            work,
            forward=factor * work.forward,
            backward=factor * work.backward,
            messages=tuple((kind, round(left * nbytes)) for kind, nbytes in work.messages),
        )
        return costs.predict(changed, size).step

    seconds_per_byte = {name: saved_seconds[name] / max(saved_bytes[name], 1) for name in layers}
    selected = {name for name in layers if saved_seconds[name] > 0 or not any(e.ms for e in layers[name])}
    best = step(selected)
    for name in sorted(layers.keys() - selected, key=seconds_per_byte.__getitem__, reverse=True):
        if (candidate := step(selected | {name})) < best:
            selected, best = selected | {name}, candidate
    if best >= step(set()):
        selected = set()
    return plan.replace(
        e if e.rank is None or e.layer in selected else e.keep_dense(_reason(e)) for e in plan
    )


def _reason(e: Entry) -> str:
    times = "" if e.ms is None else f": {e.ms[0]:.3g} ms dense, {e.ms[1]:.3g} ms low-rank"
    return f"does not make the step shorter on this network{times}"
