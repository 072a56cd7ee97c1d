"""`ElasticLocalSteps`: local steps between replicas that come and go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression import Methods, Step, Transport
from ...layers import own_name, unwrap
from ...local.fragments import Flight, Fragment, Means, Outer
from ...local.local_steps import LocalSteps
from .elastic_exchange import ElasticExchange
from .replicas import LostReplica, Replicas, digest


@dataclass
class _Average:
    """An exchange of some fragments: what is sent, and what comes back. Nothing is kept before it is committed."""

    fragments: list[Fragment]
    differences: list[dict[str, Tensor]]
    facts: str
    shared: bytes  # digest of the anchor
    since: list[int]  # updates of this replica, by fragment
    counts: list[int]  # of the engines' steps so far
    error: LostReplica | None = None
    steps: list[Step] = field(default_factory=list)
    means: list[Means] = field(default_factory=list)


class ElasticLocalSteps(ElasticExchange, LocalSteps):
    """`pf.LocalSteps` between replicas that may be killed, hang, join and come back while the others continue.

    A replica that joins gets weights, low-rank structure, outer and inner optimizer state, error feedback and the position
    from another one. If a replica is lost during an exchange, the others keep what they have trained and repeat the exchange without it. A
    replica that was away for some rounds continues from the anchor of the others and keeps its inner optimizer and error feedback.

    An average is the mean over the replicas that have made updates since the last one.

    Args:
        replicas: the replicas of this job.
        h, outer, method, fragments, mixing, pattern: see `pf.LocalSteps`.
        delay: see `pf.LocalSteps`; below h / fragments, because only one average may be on its way.

    Attributes:
        position: number of updates of the whole job, on each replica. A replica that joins continues from that of the others.

    >>> from torchft.coordination import LighthouseServer
    >>> lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    >>> port = lighthouse.address().split(":")[-1]
    >>> replicas = Replicas(f"http://127.0.0.1:{port}", hostname="127.0.0.1")
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = ElasticLocalSteps(replicas, 2)
    >>> local.start(model, optimizer)
    >>> while local.position < 4:
    ...     model(torch.ones(2)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     print(local.step(model), end=" ")
    False True False True
    >>> replicas.shutdown(), lighthouse.shutdown()
    (None, None)
    """

    _exchanged = "local steps"

    def __init__(
        self,
        replicas: Replicas,
        h: int,
        *,
        outer: Outer | None = None,
        method: Methods | None = None,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
    ) -> None:
        self._replicas = replicas
        super().__init__(h, outer=outer, method=method, fragments=fragments, delay=delay, mixing=mixing)
        if delay >= h // fragments:
            raise ValueError(
                f"ElasticLocalSteps: delay={delay} must be below h/fragments={h // fragments}: only one average is on its way"
            )
        self.position = 0
        self._synced = 0  # position at which all fragments were last averaged, and applied, together
        self._joined = False  # whether this replica has completed a round
        self._returns = False  # whether it joins with a state of its own, which it has loaded
        self._due: list[int] = []  # the fragments of the round that begins
        self._flying: tuple[Flight, _Average] | None = None
        replicas.share_state(self._shared_state, self._adopt, self._check)

    def _connect(self, group: dist.ProcessGroup | None, delay: int) -> tuple[None, Transport]:
        return None, self._replicas.transport

    def _begin(self) -> None:
        self._returns = self._resumed is not None
        LocalSteps.start(self, self._model)
        self._round([])
        self._returns = False

    @torch.no_grad()
    def step(self, model: nn.Module) -> bool:
        """Count one update and average what is due. Call it after every update.

        Returns:
            Whether an average was applied to the model, or to a fragment of it.
        """
        if self._resumed is not None:
            raise ValueError("ElasticLocalSteps: call local.start(model, optimizer) after load_state_dict")
        self._local_tensors(model)  # raises if parameters were replaced
        self.position += 1
        self._phase = (self._phase + 1) % self.schedule.h
        landing = self._count_update()
        due = self.schedule.due(self._phase)
        if landing:
            self._land()
        if due and self.schedule.delay:
            self._send(due)
        elif due:
            self._round(due)
        return bool(landing or (due and not self.schedule.delay))

    @torch.no_grad()
    def sync(self, model: nn.Module) -> bool:
        """Average now, on all replicas. Returns False if there was no update since the last average."""
        self._local_tensors(model)
        if self._flying is not None:
            self._land()
        if self.position == self._synced:  # equal on all replicas, unlike their own updates
            return False
        self._phase = 0  # before, so that a replica that joins gets it
        self._round(list(range(self.schedule.fragments)))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this replica, to start the whole job again. What is on its way is sent again later."""
        state = {**super().state_dict(), "position": self.position, "synced": self._synced}
        state["rounds"] = self._replicas.state_dict()
        if self._flying is not None and self._resumed is None:
            average = self._flying[1]
            for fragment, since, steps in zip(average.fragments, average.since, average.counts, strict=True):
                saved = state["fragments"][self._fragments.index(fragment)]
                saved |= {"flight": None, "since": fragment.since + since}
                saved["engine"] |= {"steps": steps}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this replica; it takes effect at the next `start`."""
        fragments = [
            {**fragment, "engine": self._engine_state(fragment["engine"])} for fragment in state["fragments"]
        ]
        super().load_state_dict({**state, "fragments": fragments})
        self.position, self._synced = state["position"], state["synced"]
        self._joined = True
        self._replicas.load_state_dict(state["rounds"])

    def _round(self, due: list[int]) -> None:
        """Average some fragments and wait for it; begin again, with those that are left, until it is committed."""
        begin, self._due = time.perf_counter(), due
        while not self._attempt(self._join()):
            pass
        self.waited += time.perf_counter() - begin

    def _send(self, due: list[int]) -> None:
        """Start to average some fragments, with the replicas that are there now."""
        self._due = due
        error = self._join()
        if error is not None or self._due != due:  # lost somebody, or was itself away: others wait for it
            if not self._attempt(error):
                self._round(self._due)
            return
        average = self._collect()
        device = next(iter(average.differences[0].values())).device
        flight = Flight.send(
            lambda: self._exchange(average) or {}, self.schedule.delay, stream=self._stream(device)
        )
        for fragment in average.fragments:
            fragment.since, fragment.flight = 0, flight
        self._flying = flight, average

    @torch.no_grad()
    def _land(self) -> None:
        """Apply the average on its way; if a replica was lost meanwhile, average again."""
        assert self._flying is not None
        begin, (flight, average), self._flying = time.perf_counter(), self._flying, None
        flight.wait()
        self.waited += time.perf_counter() - begin
        for fragment in average.fragments:
            fragment.flight = None
        if not self._finish(average):
            for fragment, since in zip(average.fragments, average.since, strict=True):
                fragment.since += since
            self._round(self._due)

    def _join(self) -> LostReplica | None:
        """Begin a round. This may replace the state of this replica, and what is due."""
        try:
            self._replicas.join()
        except LostReplica as error:
            return error
        for fragment in self._fragments:
            fragment.engine.state.move(self._transport.worker, self._transport.size)
        return None

    def _attempt(self, error: LostReplica | None) -> bool:
        """Complete a round that has begun. False: it must begin again."""
        if error is not None:
            return self._replicas.commit(error)
        average = self._collect()
        self._exchange(average)
        return self._finish(average, blocking=True)

    def _collect(self) -> _Average:
        assert self._anchor is not None
        tensors = self._local_tensors(self._model)
        fragments = [self._fragments[p] for p in self._due]
        counts = [fragment.engine.steps for fragment in fragments]
        layout = [(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]
        return _Average(
            fragments,
            [self._anchor.differences(fragment.names, tensors) for fragment in fragments],
            repr((self.schedule, self.method, self._due, counts, layout)),
            digest(self._anchor.tensors()),
            [fragment.since for fragment in fragments],
            counts,
        )

    @torch.no_grad()
    def _exchange(self, average: _Average) -> None:
        """Exchange the differences. An error is kept, for `_finish`."""
        try:
            contributors = self._replicas.agree(
                average.facts, average.shared, any(average.since), self._returns
            )
            for fragment, differences in zip(average.fragments, average.differences, strict=True):
                means = {name: torch.empty_like(x) for name, x in differences.items()}
                fragment.engine.arrange(differences)
                step = fragment.engine.begin()
                step.add(differences)
                step.finish(means)
                average.steps.append(step)
                average.means.append(means)
                self._average_of_contributors_(means, contributors)
            found = {f"{i} {name}": x for i, means in enumerate(average.means) for name, x in means.items()}
            self._replicas.confirm(digest(found))
        except LostReplica as error:
            average.error = error.with_traceback(None)
            average.steps.clear()  # they hold the group, whose connections must be closed

    @torch.no_grad()
    def _finish(self, average: _Average, blocking: bool = False) -> bool:
        """Commit an exchange and apply it. False: nothing has changed."""
        if not self._replicas.commit(average.error):
            for fragment, count in zip(average.fragments, average.counts, strict=True):
                fragment.engine.state.steps = count
            return False
        for step in average.steps:
            step.commit()
        for fragment in average.fragments if blocking else ():
            fragment.since = 0
        if blocking and len(average.fragments) in (0, self.schedule.fragments):
            self._synced = self.position
        if average.fragments:
            self._apply(average.fragments, average.means, self._local_tensors(self._model))
        self._joined = True
        return True

    def _shared_state(self) -> dict[str, Any]:
        """Return what another replica needs to continue like this one."""
        assert self._anchor is not None
        inner = unwrap(self._model)
        trained = [own_name(n) for n, p in inner.named_parameters(remove_duplicate=False) if p.requires_grad]
        local = super().state_dict()
        for fragment in local["fragments"]:
            fragment["engine"] = self._engine_state(fragment["engine"])
        return {
            "exchanged": self._exchanged,
            "position": self.position,
            "synced": self._synced,
            "due": self._due,
            "returns": self._returns,
            "shared": self._shared(without={*trained, *self._anchor.buffers}),
            "local": local,
        }

    def _tensors_beside(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        self.check_state_dict(state["local"])
        return {**state["local"]["anchor"], **state["local"]["buffers"]}

    @torch.no_grad()
    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Continue like another replica.

        A replica that has completed rounds, before or after it was started, keeps its inner optimizer and error feedback, and
        what it has trained of fragments that the others have not averaged meanwhile.
        """
        assert self._anchor is not None
        local, ranks = state["local"], state["shared"]["ranks"]
        own = self._joined and bool(self._due or self._returns) and self._ranks == ranks
        tensors = self._tensors_beside(state)
        before = {name: x.clone() for name, x in self._anchor.tensors().items()}
        changed = {n for n, x in tensors.items() if not own or not torch.equal(before[n], x.to(before[n]))}
        for fragment, theirs in zip(self._fragments, local["fragments"], strict=True):
            fragment.engine.state.release_divided(self._replicas.manager.num_participants())
            mine = fragment.engine.state_dict()
            keep = own and not changed & set(fragment.names)
            theirs |= {"since": fragment.since if keep else 0, "flight": None}
            theirs["engine"] |= {"worker": self._transport.worker, "size": self._transport.size}
            if own:
                theirs["engine"]["own"] = mine["own"]
        self._load_shared(state["shared"], tensors, own)
        super().load_state_dict(local)
        LocalSteps.start(self, self._model)
        self._anchor.copy_to(changed, self._local_tensors(self._model))
        self.position, self._synced, self._due = state["position"], state["synced"], list(state["due"])
        self._returns = state["returns"]  # of the other replica; if it trains, so does this one from here on
