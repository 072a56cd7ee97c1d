"""`advise`: measures what a step computes, predicts every way to train on a network, and can run the best of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compression import NoCompression
from ...compression.method import Method
from ...distributed.workers import Workers
from ...measure import CostModel, Link, Work, probe
from ...measure.compute_work import COMPUTING
from ...measure.fsdp2_messages import sharded
from ...measure.ranking import Choice, Ranking
from ...measure.remedies import Job, Remedy, gradients, message_bytes, plain
from ...measure.worthwhile import worthwhile
from ...planning.plan import Plan
from ...planning.planner import plan
from ..train.choice import choice
from .advice import Advice
from .contender import Contender
from .current_job import in_job, shared
from .measured_work import computing
from .subject import Subject
from .timing_rounds import turns
from .ways import LOW_RANK, NODE, full_rank, named, way

#: Compression methods that are tried, the simplest first.
METHODS = ("bf16", "int8", "topk-0.01", "powersgd-4")
#: Shares of the full rank, of the range that is told.
RANKS = (0.125, 0.5)
_NOTE = "full-rank at first"


def advise(
    about: Subject,
    link: Link | None = None,
    *,
    network: str = "real",
    nodes: int,
    per_node: int = 1,
    engine: str = "ddp",
    methods: Sequence[str] = METHODS,
) -> Advice:
    """Rank the ways to train `about` on `nodes` machines of `per_node` workers. In a job: call it on all ranks.

    Args:
        link: what joins them; None: that of this job, probed.
    """
    return _Advisor(about, link, nodes, per_node, engine, methods).advice(network)


def check(found: Advice, about: Subject, rounds: int = 5, best: int | None = 3) -> Advice:
    """Run dense training, the `best` (None: all) and what low rank begins as in this job, by turns; the clock decides."""
    chosen = found.choices if best is None else found.top(best)
    names = dict.fromkeys(["dense", *(name for c in chosen for name in (full_rank(c.name), c.name))])
    times = turns({name: _way(name, about, found) for name in names}, rounds)
    steps = shared([statistics.median(laps) for laps in times.values()])
    return found.clocked(dict(zip(times, steps, strict=True)))


def _way(name: str, about: Subject, found: Advice) -> Contender:
    chosen, levels = named(name)
    return way(about, chosen, found.plans.get(name), levels)


class _Advisor:
    def __init__(
        self,
        about: Subject,
        link: Link | None,
        nodes: int,
        per_node: int,
        engine: str,
        methods: Sequence[str],
    ) -> None:
        self.about, self.nodes, self.per_node, self.engine = about, nodes, per_node, engine
        self.size = nodes * per_node
        self.words = {word: method_of(word) for word in (methods if engine == "ddp" else ("bf16",))}
        group = dist.group.WORLD if in_job() else None
        self.workers = Workers(group, torch.device(about.device), "advise")
        dense = way(about, choice("dense"))
        self.model = dense.bare
        self.workers.together(self._refuse_no_number)
        first = computing(dense)
        self.timed = self._timed(about.rank)
        self.bare = _faster(first, computing(dense))
        link = link or probe(device=about.device, largest=message_bytes(self.model))
        self.costs = CostModel(link=link)
        self.dense = self._plainly(self.bare, gradients(self.model))
        self.plans: dict[str, Plan] = {}
        self._jobs: dict[str, Job] = {}  # of low-rank models, by their plans

    def advice(self, network: str) -> Advice:
        now = self.costs.predict(self.dense, self.size)
        ranking = Ranking(
            costs=self.costs, now=self.dense, size=self.size, warm_up=self.about.warm_up,
            hours=None if self.about.steps is None else self.about.steps * now.step / 3600,
        )  # fmt: skip
        dense = Remedy(kind="", name="dense", work=self.dense)
        choices = [ranking.choice(self._slowest(r)) for r in (dense, *self._remedies())]
        return Advice(
            subject=self.about.name, network=network, nodes=self.nodes, per_node=self.per_node,
            engine=self.engine, link=self.costs.link, computing=self.bare, choices=_in_order(choices),
            plans=self.plans, ceiling=now.step / sum(getattr(self.bare, part) for part in COMPUTING), ranks=self._ranks(),
            warm_up=self.about.warm_up,
        )  # fmt: skip

    def _refuse_no_number(self) -> None:
        """Compression treats gradients that are not finite in a way of its own, which says nothing of the usual one."""
        loss = float(self.about.forward(self.about.build(), self.about.batch()).detach())
        if not math.isfinite(loss):
            raise ValueError(
                f"{self.about.name}: the loss of the model as it is built is {loss}; give one that trains"
            )

    def _remedies(self) -> Iterator[Remedy]:
        """Their names are the words of the command line."""
        job = Job(self.model, self.dense, self.size, None, self.timed, _NOTE)
        words = self.words if self.size > 1 else {}
        alone = {word: self._compressed(job, word, method) for word, method in words.items()}
        whole = max(1, sum(n for _, n in self.dense.messages))
        shares = {LOW_RANK: 1.0} | {
            f"{LOW_RANK}+{word}": sum(n for _, n in one.work.messages) / whole for word, one in alone.items()
        }
        found = {n: worthwhile(self.timed, self.dense, self.costs, self.size, x) for n, x in shares.items()}
        self.plans = {name: made for name, made in found.items() if made.ranks}
        self._measure([*self.plans.values(), *self._at_ranks().values()])
        if LOW_RANK in self.plans:
            yield replace(self._switched(self._jobs[self.plans[LOW_RANK].hash]), name=LOW_RANK)
        for word, one in alone.items():
            yield one
            name = f"{LOW_RANK}+{word}"
            if name in self.plans:
                yield replace(self._pair(self._jobs[self.plans[name].hash], one), name=name)
        if 1 < self.per_node < self.size and self.engine == "ddp":
            yield from self._by_machine(job)

    def _by_machine(self, job: Job) -> Iterator[Remedy]:
        """The same ways on two levels, with the same plans."""
        for word, method in {"dense": NoCompression(), **self.words}.items():
            one = job.by_machine(method, self.per_node)
            yield replace(one, kind="", name=word + NODE)
            name = LOW_RANK if word == "dense" else f"{LOW_RANK}+{word}"
            if name in self.plans:
                self.plans[name + NODE] = self.plans[name]
                both = self._jobs[self.plans[name].hash].pair(one, self.per_node)
                yield replace(both, kind="", name=name + NODE)

    def _measure(self, plans: Sequence[Plan]) -> None:
        """The computing of every low-rank model, twice, by turns: what else runs on a machine only adds to it."""
        ways = {made.hash: way(self.about, choice(LOW_RANK), made) for made in plans}
        twice = [{name: computing(one) for name, one in ways.items()} for _ in range(2)]
        for made in plans:
            small = _faster(*(found[made.hash] for found in twice))
            self._jobs[made.hash] = Job(self.model, self.dense, self.size, None, made, _NOTE, small)

    def _compressed(self, job: Job, word: str, method: Method) -> Remedy:
        if self.engine == "fsdp2":
            work = sharded(self.bare, gradients(self.model), self.size, itemsize=2)
            return Remedy(kind="", name=word, work=work, method=method, note="MixedPrecisionPolicy")
        return replace(job.compressed(method, ""), name=word)

    def _switched(self, job: Job) -> Remedy:
        if self.engine == "fsdp2":
            work = sharded(job.low_rank, job.small, self.size)
            return Remedy(kind="", name="", work=work, warm_up=self.dense, note=_NOTE)
        return replace(job.switched(), kind="")

    def _pair(self, job: Job, one: Remedy) -> Remedy:
        if self.engine == "fsdp2":
            work = sharded(job.low_rank, job.small, self.size, itemsize=2)
            return Remedy(kind="", name="", work=work, warm_up=one.work, note=_NOTE)
        return replace(job.pair(one), kind="")

    def _timed(self, rank: float) -> Plan:
        """Every layer that could be low-rank, with its times; rank 0's, so that all decide alike."""
        batch = self.about.batch()
        given: dict[str, Any] = {
            "keep": self.about.keep,
            "example": lambda net: self.about.forward(net, batch),
        }
        model = self.about.build()

        def look() -> str:
            ranks = plan(model, rank, **given)
            times = plan(model, rank, measure=True, **given)
            both = zip(ranks, times, strict=True)
            return ranks.replace(replace(e, ms=t.ms) for e, t in both).to_json()

        return Plan.from_json(self.workers.tell(self.workers.together(look)))

    def _at_ranks(self) -> dict[float, Plan]:
        """The plan of low rank alone at other ranks of the same layers."""
        if LOW_RANK not in self.plans:
            return {}
        only = [*self.plans[LOW_RANK].ranks]
        found = {share: plan(self.model, share, only=only) for share in RANKS}
        return {share: made for share, made in found.items() if made.ranks}

    def _ranks(self) -> dict[float, float]:
        """Seconds of a step at them."""
        found = {}
        for share, made in self._at_ranks().items():
            job = self._jobs[made.hash]
            found[share] = self.costs.predict(self._plainly(job.low_rank, job.small), self.size).step
        return found

    def _plainly(self, work: Work, like: Mapping[str, Tensor]) -> Work:
        return sharded(work, like, self.size) if self.engine == "fsdp2" else plain(work, like)

    def _slowest(self, remedy: Remedy) -> Remedy:
        """Encoding and decoding as the slowest rank does it, for which the others wait."""

        def longest(work: Work) -> Work:
            encode, decode = shared([work.encode, work.decode], slowest=True)
            return replace(work, encode=encode, decode=decode)

        return replace(remedy, work=longest(remedy.work), warm_up=remedy.warm_up and longest(remedy.warm_up))


def _faster(a: Work, b: Work) -> Work:
    return min(a, b, key=lambda work: work.forward + work.backward + work.optimizer + work.data)


def method_of(word: str) -> Method:
    """One of `--methods`.

    >>> method_of("powersgd-4")
    PowerSGD(rank=4)
    """
    found = choice(word)
    if found.compress is None or found.model != "dense":
        raise ValueError(
            f"--methods {word}: name compression methods alone; low rank and pairs are tried anyway"
        )
    return found.compress


def _in_order(choices: list[Choice]) -> list[Choice]:
    """By what they ask of the user: dense, one cast, low rank, then what loses more; each on one level first."""
    simple = ["dense", "bf16", LOW_RANK, f"{LOW_RANK}+bf16"]

    def asks(c: Choice) -> tuple[int, bool]:
        word = c.name.removesuffix(NODE)
        return simple.index(word) if word in simple else len(simple), c.name.endswith(NODE)

    return sorted(choices, key=asks)
