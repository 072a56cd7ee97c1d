"""`worthwhile`: of a plan's layers those that make the step shorter on a link, by their measured times and their bytes."""

from __future__ import annotations

from dataclasses import replace

from ..planning.plan import Entry, Plan
from .cost_model import CostModel, Work

#: Computing never gets shorter than this share of itself, whatever single layers promise.
_LEAST = 0.05


def worthwhile(made: Plan, work: Work, costs: CostModel, size: int, share: float = 1.0) -> Plan:
    """The plan with those layers left dense whose low-rank form is slower by more than their bytes bring.

    Layers that compute faster low-rank are in any case in. The others come in one by one, those that save most bytes
    for the time they lose first, as long as the step gets shorter.

    Args:
        made: ranks, with times where layers were timed.
        work: of a dense step, with plain DDP's messages.
        share: of the bytes that are sent, where a method compresses them.

    >>> import torch, pufferfish as pf
    >>> from pufferfish.measure import Link
    >>> made = pf.plan(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    >>> slower = made.replace(replace(e, ms=(1.0, 1.5)) for e in made)
    >>> work = Work(forward=0.001, backward=0.002, messages=(("all_reduce", 263_168),))
    >>> for bandwidth in (1e8, 1e10):
    ...     costs = CostModel(link=Link.of(bandwidth=bandwidth, latency=0, size=2))
    ...     print(len(worthwhile(slower, work, costs, 2).ranks))
    1
    0
    """
    layers: dict[str, list[Entry]] = {}
    for e in made:
        if e.rank is not None:
            layers.setdefault(e.layer, []).append(e)
    saved = {name: _seconds(entries) for name, entries in layers.items()}
    fewer = {
        name: sum((e.before - e.after) * e.itemsize for e in entries if e.trainable)
        for name, entries in layers.items()
    }
    whole, total = work.forward + work.backward, made.before.gradient_bytes

    def step(chosen: set[str]) -> float:
        pace = max(_LEAST, 1 - sum(saved[name] for name in chosen) / whole) if whole else 1.0
        left = share * (1 - sum(fewer[name] for name in chosen) / total) if total else share
        messages = tuple((kind, round(left * nbytes)) for kind, nbytes in work.messages)
        gathers = tuple((kind, round(left * nbytes)) for kind, nbytes in work.gathers)
        changed = replace(
            work, forward=pace * work.forward, backward=pace * work.backward, messages=messages, gathers=gathers
        )  # fmt: skip
        return costs.predict(changed, size).step

    chosen = {name for name in layers if saved[name] > 0 or not any(e.ms for e in layers[name])}
    best = step(chosen)
    for name in sorted(
        layers.keys() - chosen, key=lambda name: saved[name] / max(fewer[name], 1), reverse=True
    ):
        if (with_it := step(chosen | {name})) < best:
            chosen, best = chosen | {name}, with_it
    if best >= step(set()):
        chosen = set()
    return made.replace(e if e.rank is None or e.layer in chosen else e.stays(_reason(e)) for e in made)


def _seconds(entries: list[Entry]) -> float:
    """That a layer's low-rank form is faster; the entries of one layer have the same times."""
    ms = entries[0].ms
    return 0.0 if ms is None else (ms[0] - ms[1]) / 1e3


def _reason(e: Entry) -> str:
    times = "" if e.ms is None else f": {e.ms[0]:.3g} ms dense, {e.ms[1]:.3g} ms low-rank"
    return f"not worth it on this network{times}"
