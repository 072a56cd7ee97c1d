"""`Rounds`: send the fragments of a model, and apply their averages."""

import time
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..compression.exchange import Transport
from ..distributed.workers import Workers
from .all_finite import all_finite
from .anchor import Anchor
from .flight import Flight, Means
from .fragment import Fragment
from .schedule import Schedule

#: What the workers compare before an average.
UPDATES = "the number of updates since the last average"


class Rounds:
    """The averages of all fragments: done at once, or sent and applied some updates later.

    Args:
        schedule: has the delay and the mixing of averages on their way.
        transport: sends them.

    Attributes:
        anchor, fragments: set by the owner.
        inside: workers that train this replica together.
        lost: number of averages discarded because they were not finite.
        waited: seconds in which the caller waited for averages.
        applied_bytes: wire bytes of the averages applied so far, the same on all workers at the same update.
    """

    anchor: Anchor

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.schedule, self.transport = schedule, transport
        self.fragments: list[Fragment] = []
        self.inside: list[Workers] = []
        self.lost = 0
        self.waited = 0.0
        self.applied_bytes = 0.0
        self._last: Flight | None = None
        self._stream: torch.cuda.Stream | None = None  # of flights on a GPU

    def count_update(self) -> list[Fragment]:
        """Count one update of this model, and return the fragments whose averages are now to be applied."""
        landing = []
        for fragment in self.fragments:
            fragment.since += 1
            if fragment.flight is not None:
                fragment.flight.remaining -= 1
                landing += [fragment] if fragment.flight.remaining == 0 else []
        return landing

    def wait(self) -> None:
        """Wait for flights: they use the group from another thread. They are applied later."""
        begin = time.perf_counter()
        if self._last is not None:
            self._last.wait()
        self.waited += time.perf_counter() - begin

    def average(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
        """Average fragments of this model and wait for it."""
        begin, means = time.perf_counter(), []
        for fragment in fragments:
            means.append(self._metered(fragment, self.anchor.differences(fragment.names, tensors)))
            fragment.since = 0
        self.waited += time.perf_counter() - begin
        self.apply(fragments, means, tensors)

    def send(self, fragment: Fragment, tensors: Mapping[str, Tensor], facts: str) -> None:
        """Start the average of a fragment of this model. `facts` must be equal on all workers."""
        differences = self.anchor.differences(fragment.names, tensors)
        device = next(iter(differences.values())).device
        workers = Workers(self.transport.group, device, "LocalSteps.step")

        def average() -> Means:
            workers.agree(facts, 0, UPDATES)
            return self._metered(fragment, differences)

        fragment.since = 0
        self._last = Flight.send(average, self.schedule.delay, after=self._last, stream=self.stream(device))
        fragment.flight = self._last

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of flights on a GPU; None on a CPU."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def land(self, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
        """Apply averages that were on their way."""
        begin, means = time.perf_counter(), []
        for fragment in fragments:
            assert fragment.flight is not None
            means.append(fragment.flight.wait())
            self._last = None if self._last is fragment.flight else self._last
            fragment.flight = None
        self.waited += time.perf_counter() - begin
        self.apply(fragments, means, tensors)

    def apply(
        self, fragments: Sequence[Fragment], means: Sequence[Means], tensors: Mapping[str, Tensor]
    ) -> None:
        """Update the anchor by the averages of some fragments, and this model by the anchor."""
        self.applied_bytes += sum(fragment.sent_bytes for fragment in fragments)
        finite = self._all_finite(means)
        for fragment, mean, ok in zip(fragments, means, finite, strict=True):
            if ok:
                self.anchor.step(mean)
                # Without an update since it was sent, a worker has nothing of its own to keep.
                mixing = self.schedule.mixing if fragment.since else 0.0
                self.anchor.copy_to(fragment.names, tensors, mixing)
        if not all(finite):
            self.lost += 1
            source = "another worker" if all_finite(tensors.values()) else "this worker"
            warnings.warn(
                f"LocalSteps, average {self.transport.meter.steps}: the model of {source} is not finite; all workers "
                "return to the last averaged model",
                RuntimeWarning,
                stacklevel=5,
            )
            self._return_to_anchor(tensors)

    def _metered(self, fragment: Fragment, differences: Means) -> Means:
        """Average a fragment and count its bytes; averages run one after the other."""
        before = self.transport.meter.wire_bytes
        means = fragment.engine.average(differences)
        fragment.sent_bytes = self.transport.meter.wire_bytes - before
        return means

    def _return_to_anchor(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the anchor, with all fragments: a model with one that is not finite has no finite gradient."""
        flying = {f: f.flight.wait() for f in self.fragments if f.flight is not None}
        for fragment, ok in zip(flying, self._all_finite(list(flying.values())), strict=True):
            fragment.flight = fragment.flight if ok else None
        for fragment in self.fragments:
            fragment.since = 0
        self.anchor.copy_to(tensors, tensors)

    def _all_finite(self, means: Sequence[Means]) -> list[bool]:
        """Whether each mean is finite, on all workers of the replica: each may hold another shard."""
        bad = torch.tensor([not all_finite(mean.values()) for mean in means], dtype=torch.float32)
        for workers in self.inside if means else ():
            bad = workers.max(bad)
        return [not flag for flag in bad.tolist()]
